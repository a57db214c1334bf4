// Flyball's live page: reads /v1/..., follows /v1/stream, and draws. Data from jobs and hosts goes into the page as
// text, never as markup.
"use strict";

const REFRESH_MS = 150; // from an event to the refresh
const STEPS_REFRESH_MS = 500; // the same for completed steps, which arrive all the time
const SLOW_REFRESH_MS = 3000;
const QUIET_REFRESH_MS = 5000; // even without an event: a host that stops reporting causes none
const MAX_POINTS = 1500;
const TIMELINE_LENGTH = 200;
const TIMELINE_KINDS = [
  "job_submitted", "job_ended", "generation_granted", "workers_stopped", "generation_started", "restored",
  "fault_injected", "signal", "incident_opened", "incident_closed", "decision", "action_ended", "host_joined",
  "host_left", "controller_elected",
];
const STATE_LOOKS = {
  good: ["running", "succeeded", "healthy", "spare", "resolved", "step", "checkpoint", "eval", "data", "done"],
  warn: ["submitted", "suspect", "degraded", "cordoned", "in_repair", "stopped", "starting", "restoring", "waiting",
    "parked", "open", "deciding", "acting", "verifying", "queued", "dispatched", "acknowledged", "superseded"],
  bad: ["failed", "silent", "escalated", "exited", "timed_out"],
};
const MARKS = { good: "●", warn: "▲", bad: "■", "": "○" };
const OPEN_STATES = new Set(["open", "deciding", "acting", "verifying"]);

const page = { job: null, chosen: new URLSearchParams(location.search).get("job"), shown: new Map(), points: [], losses: [], timeline: [] };

// --- small helpers ------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);

function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

function drawing(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  if (text !== undefined) node.textContent = text;
  return node;
}

const words = (name) => String(name).replaceAll("_", " ");
const look = (state) => Object.keys(STATE_LOOKS).find((kind) => STATE_LOOKS[kind].includes(state)) ?? "";
const chip = (state) => element("span", `chip ${look(state)}`, element("span", "", MARKS[look(state)]), words(state));
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)}%`;

function timeOf(at) {
  const node = element("time", "", clock(at));
  node.dateTime = new Date(at * 1000).toISOString();
  node.title = new Date(at * 1000).toLocaleString();
  return node;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 120 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function facts(pairs) {
  const list = element("dl", "facts");
  for (const [name, value] of pairs) {
    if (value !== null && value !== undefined && value !== "") list.append(element("div", "", element("dt", "", name), element("dd", "", value)));
  }
  return list;
}

function table(heads, rows) {
  const cell = (tag, value, numeric) => element(tag, numeric ? "number" : "", value);
  const head = element("tr", "", ...heads.map(([name, numeric]) => cell("th", name, numeric)));
  const body = rows.map((row) => element("tr", "", ...row.map((value, i) => cell("td", value, heads[i][1]))));
  return element("table", "", element("thead", "", head), element("tbody", "", ...body));
}

/** Redraw a section only if its data changed, to keep animations and selections in it. */
function show(id, data, draw) {
  const seen = JSON.stringify(data);
  if (page.shown.get(id) === seen) return;
  page.shown.set(id, seen);
  byId(id).replaceChildren(...[draw(data)].flat());
}

// --- requests to the supervisor -----------------------------------------------------------------------------------

async function get(path, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const one of [value].flat()) parameters.append(name, one);
  const answer = await fetch(`/v1/${path}?${parameters}`, { headers: { Accept: "application/json" } });
  if (answer.status === 401) throw new Error("token refused: open the link with the token again");
  if (answer.status === 404) return null;
  if (!answer.ok) throw Object.assign(new Error(`the supervisor answered ${answer.status}`), { status: answer.status });
  return answer.json();
}

/** Fetch all items of a list, page by page. */
async function getAll(path) {
  const items = [];
  let before = "";
  do {
    const answer = await get(path, { limit: 500, before });
    items.unshift(...answer.items);
    before = answer.next_before;
  } while (before);
  return items;
}

/** Fetch the report. While the supervisor is too busy, return the previous one: the next refresh tries again. */
async function getGoodput(about) {
  try {
    return await get("goodput", about);
  } catch (error) {
    if (error.status === 503) return page.goodput;
    throw error;
  }
}

const link = { stream: "connecting", troubles: new Map() }; // name of the last failed attempt -> why

function showLink() {
  const text = [...link.troubles.values()][0] ?? link.stream;
  byId("link").classList.toggle("away", text !== "live");
  if (byId("link-text").textContent !== text) byId("link-text").textContent = text;
}

function streamIs(state) {
  link.stream = state;
  showLink();
}

/** Run `work`. If it fails, show why in the header until it succeeds. */
async function attempt(name, work) {
  try {
    await work();
    link.troubles.delete(name);
  } catch (error) {
    link.troubles.set(name, error.message);
  }
  showLink();
}

/** Return a function that runs `work` soon, never twice at once, and at most every `pauseMs`. */
function paced(name, work, pauseMs) {
  let timer = null, running = false, again = false;
  const run = async () => {
    timer = null;
    running = true;
    await attempt(name, work);
    running = false;
    if (again) { again = false; soon(); }
  };
  const soon = () => {
    if (running) again = true;
    else timer ??= setTimeout(run, pauseMs);
  };
  return soon;
}

const refresh = paced("refresh", async () => {
  const jobs = (await get("jobs")).items;
  showPicker(jobs);
  const running = jobs.filter((job) => !job.ended_at);
  const job = jobs.find((one) => one.job === page.chosen) ?? running.at(-1) ?? jobs.at(-1) ?? null;
  if (job?.job !== page.job?.job) startOver(job);
  else if (link.troubles.has("follow")) attempt("follow", () => follow(job));
  page.job = job;
  const about = job ? { job: job.job } : {};
  const [hosts, incidents, decisions] = await Promise.all([getAll("hosts"), get("incidents", about), get("decisions", about)]);
  if (job?.job !== page.job?.job) return; // another job was chosen meanwhile
  page.incidents = incidents.items;
  page.hosts = hosts;
  showJob(job);
  showHosts(hosts, job);
  showIncidents(incidents.items, decisions.items);
  show("decisions", decisions.items.slice(-TIMELINE_LENGTH).reverse(), drawDecisions);
  drawProgress(incidents.items);
}, REFRESH_MS);

const refreshSteps = paced("refreshSteps", async () => {
  const job = page.job && await get(`jobs/${encodeURIComponent(page.job.job)}`);
  if (!job || job.job !== page.job?.job) return;
  page.job = job;
  showJob(job);
  showHosts(page.hosts ?? [], job);
  drawProgress(page.incidents ?? []);
}, STEPS_REFRESH_MS);

const refreshSlowly = paced("refreshSlowly", async () => {
  if (!page.job) return;
  const about = { job: page.job.job };
  const [goodput, checkpoints] = await Promise.all([getGoodput(about), get("checkpoints", about)]);
  if (about.job !== page.job?.job) return; // another job was chosen meanwhile
  page.goodput = goodput;
  if (goodput) show("goodput", goodput, drawGoodput);
  if (checkpoints) show("checkpoints", checkpoints, drawCheckpoints);
  showTiles();
}, SLOW_REFRESH_MS / 2);

function startOver(job) {
  page.points = [];
  page.losses = [];
  page.timeline = [];
  page.goodput = null;
  page.incidents = [];
  page.job = job;
  for (const id of ["goodput", "checkpoints", "timeline", "progress"]) { byId(id).replaceChildren(); page.shown.delete(id); }
  attempt("follow", () => follow(job));
  refreshSlowly();
}

async function follow(job) {
  page.stream?.close();
  const about = job ? { job: job.job } : {};
  const past = await get("events", { ...about, newest: true, limit: TIMELINE_LENGTH, kind: TIMELINE_KINDS });
  const steps = job ? await get("events", { ...about, newest: true, limit: 1000, kind: "steps" }) : { items: [], next_after: 0 };
  if (job?.job !== page.job?.job) return;
  for (const { event } of steps.items) addPoints(event);
  page.timeline = past.items.map((item) => item.event);
  show("timeline", page.timeline, drawTimeline);
  const parameters = new URLSearchParams({ ...about, after: past.next_after }); // the handler skips steps read above
  for (const kind of [...TIMELINE_KINDS, "steps"]) parameters.append("kind", kind);
  page.stream = new EventSource(`/v1/stream?${parameters}`);
  page.stream.onopen = () => streamIs("live");
  page.stream.onerror = () => streamIs("reconnecting");
  for (const kind of TIMELINE_KINDS) page.stream.addEventListener(kind, (message) => {
    page.timeline = [...page.timeline, JSON.parse(message.data)].slice(-TIMELINE_LENGTH);
    show("timeline", page.timeline, drawTimeline);
    refresh();
    refreshSlowly();
  });
  page.stream.addEventListener("steps", (message) => {
    if (Number(message.lastEventId) <= steps.next_after) return;
    addPoints(JSON.parse(message.data));
    refreshSteps();
  });
}

// --- the job ------------------------------------------------------------------------------------------------------

function showPicker(jobs) {
  byId("picker").hidden = jobs.length < 2;
  show("job-choice", jobs.map((job) => job.job), (names) => names.map((name) => {
    const option = element("option", "", name);
    option.value = name;
    return option;
  }));
  if (page.job && document.activeElement !== byId("job-choice")) byId("job-choice").value = page.job.job;
}

function showJob(job) {
  if (!job) return;
  document.title = `${job.job} · ${job.state} · Flyball`;
  show("job-name", job.job, String);
  byId("job-state").hidden = false;
  byId("job-state").className = `chip ${look(job.state)}`;
  show("job-state", job.state, (state) => [element("span", "", MARKS[look(state)]), ` ${words(state)}`]);
  show("job-message", [job.message, job.spec.argv], ([message, argv]) => [message ? `${message} · ` : "", element("span", "mono", argv.join(" "))]);
  showTiles();
}

function showTiles() {
  const job = page.job;
  if (!job) return;
  const known = (page.incidents ?? []).filter((incident) => incident.lost_steps >= 0);
  const tiles = [
    ["Newest step", job.newest_step >= 0 ? job.newest_step : "–"],
    ...(job.loss ? [["Loss", lossText(job.loss.value), `at step ${job.loss.step}`, drawLoss]] : []),
    ["Goodput so far", percent(page.goodput?.goodput)],
    ["Elapsed", seconds(Math.max(0, Math.round((job.ended_at ?? Date.now() / 1000) - job.submitted_at)))],
    ["Generation", job.generation >= 0 ? job.generation : "–"],
    ["Restarts", job.restart_count, `${job.restarts_used} of ${job.spec.max_restarts} used since the last progress`],
    ["Steps lost", known.reduce((sum, incident) => sum + incident.lost_steps, 0), `in ${counted(page.incidents?.length ?? 0, "incident")}`],
    ["Ranks", job.world_size, `${job.spec.nnodes} × ${job.spec.nproc_per_node}`],
  ];
  show("tiles", [tiles.map(([name, value, note]) => [name, value, note]), page.losses.length], () => tiles.map(([name, value, note, draw]) =>
    element("div", "", element("dt", "", name), element("dd", "", value, note ? element("small", "", ` ${note}`) : null), draw ? draw() : null)));
}

/** NaN and infinities arrive as text. */
function lossText(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(5))) : value;
}

/** Draw the reported losses by step. A repeated step replaces its earlier loss. */
function drawLoss() {
  const bySteps = new Map(page.losses.map(({ step, value }) => [step, value]));
  const points = [...bySteps].sort(([a], [b]) => a - b);
  if (points.length < 2) return null;
  const [width, height] = [120, 28];
  const values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const line = points.map(([step, value]) => `${(((step - first) / (last - first)) * width).toFixed(1)},${(1 + (1 - (value - low) / (high - low || 1)) * (height - 2)).toFixed(1)}`);
  const svg = drawing("svg", { class: "loss", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Loss from step ${first} to ${last}, between ${lossText(low)} and ${lossText(high)}` });
  svg.append(drawing("polyline", { class: "steps", points: line.join(" ") }));
  return svg;
}

// --- hosts --------------------------------------------------------------------------------------------------------

function showHosts(hosts, job) {
  const ranks = new Map((job?.ranks ?? []).map((rank) => [rank.rank, rank]));
  const data = hosts.map((host) => ({
    id: host.host_id, state: host.state, reason: host.reason, domain: host.failure_domain, engine: host.engine_alive,
    copies: host.copies, size: host.copies_size_bytes, preempt: host.preempt_deadline_at, isSilent: host.state === "silent",
    ranks: host.job === job?.job ? host.ranks.map((rank) => ranks.get(rank)).filter(Boolean).map(({ rank, step, phase }) => ({ rank, step, phase })) : [],
    role: host.job ? "" : "no ranks",
  }));
  show("hosts", data, () => data.length ? data.map(drawHost) : [element("p", "quiet", "No host has reported yet.")]);
}

function drawHost(host) {
  const notes = [
    look(host.state) === "good" ? "" : host.reason,
    host.preempt ? `preempted at ${clock(host.preempt)}` : "",
    host.engine ? `${counted(host.copies, "shard")} held, ${bytes(host.size)}` : "checkpoint engine away",
    host.domain ? `domain ${host.domain}` : "",
  ].filter(Boolean).join(" · ");
  const ranks = host.ranks.map(({ rank, step, phase }) =>
    element("div", `rank ${look(phase)}`, element("b", "", `rank ${rank}`), element("span", "", `${MARKS[look(phase)]} ${words(phase)}`), element("span", "", step >= 0 ? `step ${step}` : "no step yet")));
  return element("article", `host ${look(host.state) === "good" ? "" : look(host.state)}`,
    element("div", "host-title", element("strong", "", host.id), chip(host.state)),
    ranks.length ? element("div", "ranks", ...ranks) : element("p", "", host.role || "ranks of another job"),
    element("p", "", notes));
}

// --- incidents ----------------------------------------------------------------------------------------------------

function showIncidents(incidents, decisions) {
  const reasons = new Map(decisions.map((decision) => [decision.decision_id, decision]));
  const measured = new Map((page.goodput?.incidents ?? []).map((incident) => [incident.incident_id, incident]));
  const data = incidents.map((incident) => ({
    ...incident,
    times: timesOf(incident, measured.get(incident.incident_id)),
    chosen: incident.decision_ids.map((id) => reasons.get(id)).filter(Boolean).map(({ kind, reason, at }) => ({ kind, reason, at })),
  })).toReversed();
  show("open-incidents", data.filter((incident) => OPEN_STATES.has(incident.state)), (open) => open.map(drawIncident));
  show("incident-list", data.filter((incident) => !OPEN_STATES.has(incident.state)), (closed) =>
    closed.length ? closed.map(drawIncident) : [element("p", "quiet", data.length ? "No earlier ones." : "None so far.")]);
}

/** Return seconds since the fault as measured by goodput or, until that is available, since the first observation. */
function timesOf(incident, measured) {
  if (measured?.detected_s !== null && measured?.detected_s !== undefined) {
    const about = measured.began_is_estimate ? "≈ " : "";
    const since = (value) => (value === null ? null : about + seconds(value));
    return [since(measured.detected_s), since(measured.decided_s), since(measured.resumed_s)];
  }
  const began = incident.observed_at ?? incident.opened_at;
  const since = (at) => (at === null ? null : seconds(Math.max(0, at - began)));
  return [since(incident.opened_at), since(incident.decided_at), since(incident.resolved_at)];
}

function drawIncident(incident) {
  const isOpen = OPEN_STATES.has(incident.state);
  const [detected, decided, resumed] = incident.times;
  const last = incident.chosen.findLast((decision) => decision.kind !== "hold") ?? incident.chosen.at(-1);
  const head = element("header", "", element("h3", "", words(incident.cause)), chip(incident.state),
    element("span", "quiet", [incident.incident_id, incident.host_id, incident.generation >= 0 ? `generation ${incident.generation}` : ""].filter(Boolean).join(" · ")),
    timeOf(incident.opened_at));
  return element("article", `incident ${isOpen ? "open" : incident.state}`, head,
    last?.reason.startsWith(incident.message) ? null : element("p", "", incident.message),
    last ? element("p", "", element("strong", "", `Decision: ${words(last.kind)}. `), last.reason) : element("p", "quiet", "No decision yet."),
    facts([
      ["detected", detected],
      ["decided", decided],
      ["resumed", resumed],
      ["lost steps", incident.lost_steps >= 0 ? incident.lost_steps : null],
      ["restored step", incident.restored_step >= 0 ? incident.restored_step : null],
      ["restored from", sources(incident.restored_from)],
    ]));
}

/** Describe where the ranks restored from: "memory of host-a (1 rank); peer of host-b, over the network (2 ranks)". */
function sources(restored) {
  const counts = new Map();
  for (const { tier, source_host, socket_bytes } of restored) {
    const from = `${tier}${source_host ? ` of ${source_host}` : ""}${socket_bytes ? ", over the network" : ""}`;
    counts.set(from, (counts.get(from) ?? 0) + 1);
  }
  return [...counts].map(([from, count]) => `${from} (${counted(count, "rank")})`).join("; ");
}

// --- progress -----------------------------------------------------------------------------------------------------

/** Keep the steps of all ranks together or, in older logs, of rank 0: data-parallel ranks step together. */
function addPoints(event) {
  if (event.rank > 0) return;
  if (Number.isFinite(event.data.loss)) page.losses.push({ step: event.data.loss_step, value: event.data.loss });
  if (page.losses.length > MAX_POINTS) page.losses = page.losses.filter((_, i) => i % 2 === 1);
  event.data.completed_at.forEach((at, i) => page.points.push({ at, step: event.data.first_step + i, generation: event.generation }));
  if (page.points.length > MAX_POINTS) {
    const old = page.points.length / 2; // keep half the points of the older half
    page.points = page.points.filter((_, i) => i >= old || i % 2 === 0);
  }
}

function drawProgress(incidents) {
  const points = [...page.points].sort((a, b) => a.at - b.at);
  const box = byId("progress");
  if (points.length < 2) {
    show("progress", "none", () => element("p", "quiet", "Steps appear here once the first are completed."));
    return;
  }
  const [width, height, left, bottom] = [Math.max(320, box.clientWidth), 170, 46, 24];
  const from = points[0].at;
  const to = Math.max(points.at(-1).at, page.job?.ended_at ?? Math.ceil(Date.now() / 1000));
  const steps = points.map((point) => point.step);
  const [low, high] = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
  const x = (at) => left + ((at - from) / Math.max(to - from, 1e-3)) * (width - left - 8);
  const y = (step) => 8 + (1 - (step - low) / (high - low)) * (height - bottom - 8);
  show("progress", [width, to, points.length, points.at(-1), incidents.map((i) => [i.opened_at, i.resolved_at, i.cause])], () => {
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Step ${high} of rank 0 at ${clock(to)}, with ${incidents.length} incidents marked` });
    svg.append(drawing("line", { class: "axis", x1: left, x2: width, y1: height - bottom, y2: height - bottom }));
    for (const incident of incidents) {
      const began = Math.max(from, incident.observed_at ?? incident.opened_at);
      const ended = incident.resolved_at ?? to;
      if (ended < from) continue;
      svg.append(drawing("rect", { class: "outage", x: x(began), y: 8, width: Math.max(2, x(ended) - x(began)), height: height - bottom - 8 }));
      svg.append(drawing("line", { class: "outage-edge", x1: x(began), x2: x(began), y1: 8, y2: height - bottom }));
      svg.append(drawing("text", { x: x(began) + 4, y: 20 }, `${incident.incident_id} ${words(incident.cause)}`));
    }
    for (const generation of new Set(points.map((point) => point.generation))) {
      const line = points.filter((point) => point.generation === generation).map((point) => `${x(point.at).toFixed(1)},${y(point.step).toFixed(1)}`);
      svg.append(drawing("polyline", { class: "steps", points: line.join(" ") }));
    }
    svg.append(drawing("text", { x: left - 6, y: y(high) + 5, "text-anchor": "end" }, high));
    svg.append(drawing("text", { x: left - 6, y: y(low), "text-anchor": "end" }, low));
    svg.append(drawing("text", { x: left, y: height - 6 }, clock(from)));
    svg.append(drawing("text", { x: width - 8, y: height - 6, "text-anchor": "end" }, clock(to)));
    return svg;
  });
}

// --- goodput, checkpoints, decisions, timeline ---------------------------------------------------------------------

function drawGoodput(report) {
  const all = Object.entries(report.seconds_by_category).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  const useful = all.filter(([name]) => name === "useful");
  const rest = all.filter(([name]) => name !== "useful");
  const parts = [...useful, ...rest].map(([name, value], i) => ({ name, value, colour: name === "useful" ? "c0" : `c${Math.min(5, i || 1)}` }));
  const total = report.elapsed_s || 1;
  const stack = element("div", "stack", ...parts.map(({ value, colour }) => {
    const part = element("i", colour);
    part.style.flex = `${value / total} 0 0`;
    return part;
  }));
  stack.setAttribute("aria-hidden", "true"); // the table has the same data
  const legend = table([["time for", false], ["seconds", true], ["share", true]], parts.map(({ name, value, colour }) =>
    [element("span", "", element("i", `swatch ${colour}`), words(name)), value.toFixed(2), percent(value / total)]));
  legend.classList.add("legend");
  const notes = report.notes.map((note) => element("p", "quiet", note));
  return [stack, legend, ...notes];
}

function drawCheckpoints(checkpoints) {
  const rows = Object.entries(checkpoints.tiers).map(([tier, held]) => [
    tier, held.copies, bytes(held.size_bytes), held.newest_complete_step >= 0 ? held.newest_complete_step : "–",
  ]);
  const point = checkpoints.recovery_point;
  return [
    element("p", "", element("strong", "", point >= 0 ? `Recovery point: step ${point}` : "No recovery point yet"),
      point >= 0 ? element("span", "quiet", ` · ${counted(Math.max(0, checkpoints.newest_step - point), "step")} behind the newest`) : null),
    table([["tier", false], ["verified copies", true], ["size", true], ["newest complete step", true]], rows),
  ];
}

function drawDecisions(decisions) {
  if (!decisions.length) return [element("li", "", element("p", "quiet", "None so far."))];
  return decisions.map((decision) => element("li", "", timeOf(decision.at), element("div", "",
    element("p", "", element("strong", "", words(decision.kind)), " ", decision.action_state ? chip(decision.action_state) : null),
    element("p", "", decision.reason),
    element("p", "quiet", [decision.decision_id, decision.incident_id, `rule ${words(decision.rule)}`].filter(Boolean).join(" · ")))));
}

/* An event of one rank, or of several ranks of a host: then each value is a list. */
function restoredText({ rank, data }) {
  const all = (values) => [...new Set([values].flat())].filter((value) => value !== "").join(", ");
  const who = data.ranks ? `ranks ${all(data.ranks)} have` : `rank ${rank} has`;
  const hosts = all(data.source_host ?? "");
  const longest = Math.max(...[data.seconds].flat());
  return `${who} step ${all(data.step)} from ${all(data.source_tier)}${hosts ? ` of ${hosts}` : ""} in ${seconds(longest)}`;
}

const DESCRIPTIONS = {
  job_submitted: (e) => `job ${e.job} submitted`,
  job_ended: (e) => `job ${e.job} ended: ${e.data.outcome}`,
  generation_granted: (e) => `generation ${e.generation} granted`,
  generation_started: (e) => `generation ${e.generation} starts ${e.data.restore_step === null || e.data.restore_step === undefined ? "from the beginning" : `from step ${e.data.restore_step}`}`,
  workers_stopped: (e) => `workers of generation ${e.generation} stopped`,
  restored: (e) => restoredText(e),
  fault_injected: (e) => `fault injected: ${words(e.data.fault)} ${e.data.target ?? ""}`,
  signal: (e) => `signal: ${words(e.data.kind)} from ${e.data.source}`,
  incident_opened: (e) => `${e.incident_id} opened: ${words(e.data.cause)}`,
  incident_closed: (e) => `${e.incident_id} ${e.data.state}${e.data.lost_steps >= 0 ? `, ${counted(e.data.lost_steps, "step")} lost` : ""}`,
  decision: (e) => `${e.data.decision_id}: ${words(e.data.kind)}`,
  action_ended: (e) => `${e.data.action_id} ${words(e.data.state)}`,
  host_joined: (e) => `host ${e.host_id} joined`,
  host_left: (e) => `host ${e.host_id} left`,
  controller_elected: (e) => `a controller was elected, epoch ${e.data.epoch}`,
};

function drawTimeline(events) {
  if (!events.length) return [element("li", "", element("p", "quiet", "Nothing yet."))];
  return [...events].sort((a, b) => b.at - a.at).map((event) => element("li", "", timeOf(event.at), element("p", "", DESCRIPTIONS[event.kind]?.(event) ?? words(event.kind))));
}

// --- start --------------------------------------------------------------------------------------------------------

byId("job-choice").addEventListener("change", (change) => {
  page.chosen = change.target.value;
  history.replaceState(null, "", `/?${new URLSearchParams({ job: page.chosen })}`);
  refresh();
});
addEventListener("resize", () => drawProgress(page.incidents ?? []));
setInterval(showTiles, 1000);
setInterval(refreshSlowly, SLOW_REFRESH_MS);
setInterval(refresh, QUIET_REFRESH_MS);
startOver(null);
refresh();
