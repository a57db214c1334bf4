// /jobs/NAME: how is this job doing? The server renders all but the charts and the timeline, which grow with the stream.

import { get } from "./api.js";
import { byId, element } from "./dom.js";
import { textOfEvent } from "./events.js";
import { KINDS, attempt, follow, repeat } from "./live.js";
import { showLogs } from "./logs.js";
import { Progress } from "./progress.js";
import { localise } from "./times.js";

const TIMELINE_LENGTH = 200;

const { job } = byId("job").dataset;
const progress = new Progress(byId("progress"), byId("loss"));
let timeline = [];

function showTimeline() {
  const line = (event) => {
    const time = element("time");
    time.dateTime = new Date(event.at * 1000).toISOString();
    time.dataset.time = "clock";
    return element("li", "", time, element("p", "", textOfEvent(event)));
  };
  const lines = [...timeline].sort((a, b) => b.at - a.at).map(line);
  byId("timeline").replaceChildren(...(lines.length ? lines : [element("li", "", element("p", "quiet", "Nothing yet."))]));
  localise(byId("timeline"));
}

async function showOutages() {
  const [incidents, goodput] = await Promise.all([
    get("incidents", { job }),
    get("goodput", { job }).catch((error) => { if (error.status === 503 || error.status === 404) return null; throw error; }),
  ]);
  progress.showOutages(incidents.items, goodput);
}

await attempt("past", async () => {
  const [past, steps] = await Promise.all([
    get("events", { job, newest: true, limit: TIMELINE_LENGTH, kind: KINDS }),
    get("events", { job, newest: true, limit: 1000, kind: "steps" }),
  ]);
  for (const { event } of steps.items) progress.add(event);
  timeline = past.items.map((item) => item.event);
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
addEventListener("resize", () => progress.draw());
