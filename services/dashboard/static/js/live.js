// Keeps a page live. The page's module calls `follow()` once.
//
// An event of the stream makes this module fetch the page again; it then exchanges the elements with `data-part` and an
// id whose text changed. Elements with `data-from` and an id are filled from that address, every few seconds while they
// are near the screen: what takes the supervisor long to calculate goes there. What a module draws itself (charts) lies
// outside of both.

import { byId } from "./dom.js";
import { localise } from "./times.js";

const REFRESH_MS = 150; // from an event to the refresh
const STEPS_REFRESH_MS = 500; // the same for completed steps, which arrive all the time
const QUIET_REFRESH_MS = 5000; // even without an event: a host that stops reporting causes none
const REOPEN_MS = 5000; // after a refused stream
const REPEAT_MS = 3000; // of `data-from`, and of what else `repeat` does
const BUSY_SHARE = 4; // a refresh waits this multiple of the time that the last one took
export const KINDS = [
  "job_submitted", "job_ended", "generation_granted", "workers_stopped", "generation_started", "restored",
  "fault_injected", "signal", "incident_opened", "incident_closed", "decision", "action_ended", "host_joined",
  "host_left", "controller_elected",
];

const seen = new Map(); // id -> the HTML that the server sent
const filled = new Map(); // id -> the HTML from its `data-from`
const link = { stream: "connecting", troubles: new Map() }; // name of the last failed attempt -> why
const onFresh = [];

// --- the state of the connection ------------------------------------------------------------------------------------

function showLink() {
  const text = [...link.troubles.values()][0] ?? link.stream;
  byId("link").classList.toggle("away", text !== "live");
  if (byId("link-text").textContent !== text) byId("link-text").textContent = text;
}

/** Run `work`. If it fails, show why in the header until it succeeds. */
export async function attempt(name, work) {
  try {
    await work();
    link.troubles.delete(name);
  } catch (error) {
    link.troubles.set(name, error.message);
  }
  showLink();
}

/** Run `work` now, and again every few seconds while the page is looked at; less often if it takes long. */
export async function repeat(name, work) {
  const began = performance.now();
  if (!document.hidden) await attempt(name, work);
  setTimeout(repeat, Math.max(REPEAT_MS, BUSY_SHARE * (performance.now() - began)), name, work);
}

// --- parts ----------------------------------------------------------------------------------------------------------

/** Exchange a part's content, and keep what its reader opened and focused. */
function exchange(node, html) {
  const opened = [...node.querySelectorAll("details[open][id]")].map((one) => one.id);
  const focused = node.contains(document.activeElement) ? document.activeElement.id : "";
  node.innerHTML = html; // from our own server, whose templates escape every value
  for (const id of opened) if (byId(id)) byId(id).open = true;
  if (focused) byId(focused)?.focus();
  for (const inner of node.querySelectorAll("[data-from][id]")) if (filled.has(inner.id)) inner.innerHTML = filled.get(inner.id);
  localise(node);
}

function exchangeParts(fresh) {
  for (const node of document.querySelectorAll("[data-part][id]")) {
    const html = fresh.getElementById(node.id)?.innerHTML ?? "";
    if (seen.get(node.id) === html) continue;
    seen.set(node.id, html);
    exchange(node, html);
  }
  document.title = fresh.title;
  for (const work of onFresh) work(fresh);
}

async function textOf(address) {
  const response = await fetch(address, { headers: { Accept: "text/html" } });
  if (response.status === 401) throw new Error("logged out: reload the page and log in");
  if (!response.ok) throw Object.assign(new Error(`the supervisor answered ${response.status}`), { status: response.status });
  return response.text();
}

async function fill(node) {
  // A day begins at the reader's midnight.
  const address = node.dataset.from.replace("{midnight}", String(new Date().setHours(0, 0, 0, 0) / 1000));
  try {
    const html = await textOf(address);
    if (filled.get(node.id) === html) return;
    filled.set(node.id, html);
    exchange(byId(node.id) ?? node, html);
  } catch (error) {
    if (error.status !== 503) throw error; // busy: what is shown stays, and the next refresh tries again
  }
}

// --- refreshing -----------------------------------------------------------------------------------------------------

let tookMs = 0;
let timer = null, dueAt = 0, running = false, again = false;

async function refreshNow() {
  timer = null;
  running = true;
  const began = performance.now();
  await attempt("refresh", async () => exchangeParts(new DOMParser().parseFromString(await textOf(location.pathname + location.search), "text/html")));
  tookMs = performance.now() - began;
  running = false;
  if (again) { again = false; refresh(); }
}

/** Fetch the page again within `inMs`; never twice at once. */
export function refresh(inMs = REFRESH_MS) {
  if (document.hidden) return; // when it is looked at again, it is refreshed
  if (running) { again = true; return; }
  const pauseMs = Math.max(inMs, BUSY_SHARE * tookMs);
  const at = performance.now() + pauseMs;
  if (timer !== null && at >= dueAt) return;
  clearTimeout(timer);
  dueAt = at;
  timer = setTimeout(refreshNow, pauseMs);
}

/** Whether it is on the screen, or one or two screens away. */
function isNear(node) {
  const { top, bottom } = node.getBoundingClientRect();
  return top < 3 * innerHeight && bottom > -2 * innerHeight;
}

/** One after the other: each may take the supervisor long, and a cluster has hundreds of jobs. */
async function fillAll() {
  for (const { id } of document.querySelectorAll("[data-from][id]")) {
    const node = byId(id); // a refresh meanwhile may have exchanged it
    if (node && isNear(node)) await fill(node);
  }
}

// --- the stream -----------------------------------------------------------------------------------------------------

/** Start. `job`: only its events ('': all). `kinds`: more kinds of events. `onEvent(kind, event)`: of each;
 *  `onRefresh(fresh)`: after each refresh, with the new document. */
export function follow({ job = "", kinds = [], onEvent = () => {}, onRefresh = () => {} } = {}) {
  onFresh.push(onRefresh);
  listen(job, [...KINDS, ...kinds], onEvent, byId("content").dataset.position);
  setInterval(refresh, QUIET_REFRESH_MS);
  setInterval(() => localise(document), 1000); // "3 s ago"
  document.addEventListener("visibilitychange", () => refresh());
  repeat("fill", fillAll);
}

function listen(job, kinds, onEvent, after) {
  const parameters = new URLSearchParams({ after });
  if (job) parameters.set("job", job);
  for (const kind of kinds) parameters.append("kind", kind);
  const stream = new EventSource(`/v1/stream?${parameters}`);
  const is = (state) => { link.stream = state; showLink(); };
  stream.onopen = () => is("live");
  stream.onerror = () => {
    is("reconnecting");
    // Browsers connect again by themselves, but not after a refusal.
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => listen(job, kinds, onEvent, after), REOPEN_MS);
  };
  for (const kind of kinds) stream.addEventListener(kind, (message) => {
    after = message.lastEventId;
    onEvent(kind, JSON.parse(message.data));
    refresh(kind === "steps" ? STEPS_REFRESH_MS : REFRESH_MS);
  });
}

for (const node of document.querySelectorAll("[data-part][id]")) seen.set(node.id, node.innerHTML);
localise(document);
