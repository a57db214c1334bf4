// /hosts: which machines?

import { get } from "./api.js";
import { byId, element, words } from "./dom.js";
import { attempt, follow } from "./live.js";
import { cellAt, drawFrames, drawMap, layOut, MARKS, neighbour, picture, STATES } from "./host_map.js";
import { localise } from "./times.js";

const HINT = byId("map-cell")?.textContent ?? "";
let domains = [], map = { cells: [], labels: [], pitch: 1, height: 0 }, width = 0;
let pointed = null, chosen = null, fetching = false;

const named = (host) => map.cells.find((cell) => cell.host === host) ?? null;

function textOf(cell) {
  const where = cell.domain && cell.domain !== cell.host ? `, in ${cell.domain}` : "";
  const mark = cell.mark ? `, ${MARKS[cell.mark]?.text ?? cell.mark}` : "";
  return `${cell.host}: ${words(cell.state)}${mark}${cell.job ? `, job ${cell.job}` : ", no job"}${where}`;
}

function point(cell) {
  if (cell === pointed) return;
  pointed = cell;
  drawFrames(byId("map-mark"), map, width, pointed, chosen);
  byId("map-cell").textContent = pointed ? textOf(pointed) : HINT;
}

function draw() {
  width = byId("map").parentElement.clientWidth;
  map = layOut(domains, width);
  [pointed, chosen] = [pointed && named(pointed.host), chosen && named(chosen.host)];
  drawMap(byId("map"), map, width);
  drawFrames(byId("map-mark"), map, width, pointed, chosen);
  const states = new Set(map.cells.map((cell) => cell.state)), marks = new Set(map.cells.map((cell) => cell.mark).filter(Boolean));
  const entry = (state, mark, text) => {
    const sample = picture(state, mark, 16, window.devicePixelRatio || 1);
    sample.style.width = sample.style.height = "16px";
    sample.setAttribute("aria-hidden", "true");
    return element("li", "", sample, text);
  };
  byId("map-legend").replaceChildren(
    ...Object.keys(STATES).filter((state) => states.has(state)).map((state) => entry(state, "", words(state))),
    ...Object.keys(MARKS).filter((mark) => marks.has(mark)).map((mark) => entry("healthy", mark, MARKS[mark].text)),
  );
}

function reveal(cell) {
  const top = byId("map").getBoundingClientRect().top + cell.y;
  if (top < 80 || top > innerHeight - 40) scrollTo({ top: scrollY + top - innerHeight / 2 });
}

/* The page of the host, beside the map. */
async function show(cell) {
  const isNew = chosen?.host !== cell.host;
  chosen = cell;
  history.replaceState(null, "", `#${cell.host}`);
  drawFrames(byId("map-mark"), map, width, pointed, chosen);
  await attempt("host", async () => {
    const response = await fetch(`/hosts/${encodeURIComponent(cell.host)}`, { headers: { Accept: "text/html" } });
    if (!response.ok && response.status !== 404) throw new Error(`the supervisor answered ${response.status}`);
    const page = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("host");
    if (chosen?.host !== cell.host) return;
    const html = page?.innerHTML ?? "";
    if (byId("one").dataset.html === html) return;
    byId("one").dataset.html = html;
    byId("one").innerHTML = html ? `<div class="one-host">${html}</div>` : ""; // from our own server, which escapes all values
    localise(byId("one"));
    if (isNew) byId("one").scrollIntoView({ block: "nearest" });
  });
}

async function update() {
  if (fetching) return;
  fetching = true;
  await attempt("map", async () => {
    const fresh = (await get("host-map")).items;
    if (JSON.stringify(fresh) === JSON.stringify(domains)) return;
    domains = fresh;
    draw();
  });
  fetching = false;
}

function listen() {
  const canvas = byId("map");
  const under = (event) => { const box = canvas.getBoundingClientRect(); return cellAt(map, event.clientX - box.left, event.clientY - box.top); };
  canvas.addEventListener("pointermove", (event) => point(under(event)));
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", (event) => { const cell = under(event); if (cell) show(cell); });
  canvas.addEventListener("focus", () => point(pointed ?? chosen ?? map.cells[0] ?? null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (step && pointed) { point(neighbour(map, pointed, ...step)); reveal(pointed); }
    else if (event.key === "Enter" && pointed) show(pointed);
    else return;
    event.preventDefault();
  });
  byId("find").addEventListener("submit", (event) => { event.preventDefault(); if (pointed) show(pointed); });
  byId("find-host").addEventListener("input", ({ target }) => {
    const wanted = target.value.trim();
    const found = named(wanted) ?? map.cells.find((cell) => wanted && cell.host.includes(wanted)) ?? null;
    point(found);
    if (found) reveal(found);
    if (wanted && !found) byId("map-cell").textContent = `No host's name contains ${wanted}.`;
  });
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

if (byId("map")) {
  listen();
  await update();
  const wanted = named(decodeURIComponent(location.hash.slice(1)));
  if (wanted) { show(wanted); reveal(wanted); }
  new ResizeObserver(() => { if (byId("map").parentElement.clientWidth !== width) draw(); }).observe(byId("map").parentElement);
}
follow({ onRefresh: () => { if (byId("map")) { update(); if (chosen) show(chosen); } } });
