// /jobs/NAME: how is this job doing? The server renders all but the charts and the timeline, which grow with the stream.

import { get } from "./api.js";
import { byId, element, words } from "./dom.js";
import { textOfEvent } from "./events.js";
import { KINDS, attempt, follow, repeat } from "./live.js";
import { showLogs } from "./logs.js";
import { Progress } from "./progress.js";
import { localise } from "./times.js";

const TIMELINE_LENGTH = 200;

const { job } = byId("job").dataset;
const progress = new Progress(byId("progress"), byId("loss"));
let timeline = [];

const kindChoice = byId("timeline-kind"), textChoice = byId("timeline-text");
kindChoice.append(...KINDS.map((kind) => Object.assign(element("option", "", words(kind)), { value: kind })));

/** Fetch the newest events, of the chosen kind: a rare one would be hidden by the others. */
async function fetchTimeline() {
  const past = await get("events", { job, newest: true, limit: TIMELINE_LENGTH, kind: kindChoice.value || KINDS });
  timeline = past.items.map((item) => item.event);
}

function showTimeline() {
  const line = (event) => {
    const time = element("time");
    time.dateTime = new Date(event.at * 1000).toISOString();
    time.dataset.time = "clock";
    return element("li", "", time, element("p", "", textOfEvent(event)));
  };
  const wanted = textChoice.value.toLowerCase();
  const chosen = timeline.filter((event) => (!kindChoice.value || event.kind === kindChoice.value) && textOfEvent(event).toLowerCase().includes(wanted));
  const lines = chosen.sort((a, b) => b.at - a.at).map(line);
  const none = wanted || kindChoice.value ? "Nothing like that among the newest." : "Nothing yet.";
  byId("timeline").replaceChildren(...(lines.length ? lines : [element("li", "", element("p", "quiet", none))]));
  localise(byId("timeline"));
}

const stepsOf = async (name) => (await get("events", { job: name, newest: true, limit: 1000, kind: "steps" })).items.map((item) => item.event);

/** Draw the loss of another job beside this one's, and say how fast both are. */
async function showBeside() {
  const name = byId("beside").value;
  progress.showBeside(name, name ? await stepsOf(name) : []);
  byId("beside-about").textContent = progress.compared();
}

async function showOutages() {
  const [incidents, goodput] = await Promise.all([
    get("incidents", { job }),
    get("goodput", { job }).catch((error) => { if (error.status === 503 || error.status === 404) return null; throw error; }),
  ]);
  progress.showOutages(incidents.items, goodput);
}

await attempt("past", async () => {
  const [, steps] = await Promise.all([fetchTimeline(), stepsOf(job)]);
  for (const event of steps) progress.add(event);
});
showTimeline();
progress.draw();
repeat("outages", showOutages);
follow({
  job,
  kinds: ["steps"],
  onEvent(kind, event) {
    if (kind === "steps") progress.add(event);
    else if (!timeline.some((one) => JSON.stringify(one) === JSON.stringify(event))) {
      timeline = [...timeline, event].slice(-TIMELINE_LENGTH);
      showTimeline();
    }
  },
  onRefresh: () => progress.draw(),
});
showLogs(job);
kindChoice.addEventListener("change", async () => { await attempt("past", fetchTimeline); showTimeline(); });
textChoice.addEventListener("input", showTimeline);
byId("beside")?.addEventListener("change", () => attempt("beside", showBeside));
addEventListener("resize", () => progress.draw());
