// The map of all hosts: where each cell lies, and how it looks. Ten thousand cells are drawn at once; what follows the
// pointer is drawn on a second canvas above. Each state has a shape beside its colour.

const GAP = 18, LABEL = 18;
export const STATES = {
  healthy: { colour: "--good", shape: "circle", filled: true, faint: true }, // nearly all are: they must not shout
  spare: { colour: "--good", shape: "circle", filled: false },
  suspect: { colour: "--warn", shape: "triangle", filled: false },
  degraded: { colour: "--warn", shape: "triangle", filled: true },
  cordoned: { colour: "--warn", shape: "diamond", filled: true },
  in_repair: { colour: "--warn", shape: "diamond", filled: false },
  silent: { colour: "--bad", shape: "square", filled: true },
};
export const MARKS = {
  critical: { colour: "--bad", text: "critical condition" },
  notice: { colour: "--bad", text: "will be taken away" },
  warning: { colour: "--warn", text: "warning" },
  drain: { colour: "--warn", text: "being drained" },
};

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const byName = new Intl.Collator([], { numeric: true }).compare; // rack-2 before rack-10
const pitchFor = (hosts) => (hosts <= 60 ? 28 : hosts <= 400 ? 22 : hosts <= 2500 ? 16 : 12);

/** Return the cells, the labels, and the height of a map of this width. Domains with one host each share one block. */
export function layOut(domains, width) {
  const total = domains.reduce((sum, domain) => sum + domain.host_ids.length, 0);
  const pitch = pitchFor(total), cells = [], labels = [];
  const sorted = [...domains].sort((one, other) => byName(one.failure_domain, other.failure_domain));
  const single = domains.every((domain) => domain.host_ids.length === 1);
  let x = 0, y = 0, tallest = 0;
  for (const group of single ? [sorted] : sorted.map((domain) => [domain])) {
    const count = group.reduce((sum, domain) => sum + domain.host_ids.length, 0);
    const fitting = Math.max(1, Math.floor(width / pitch));
    const columns = single ? fitting : Math.min(count, fitting, Math.max(5, Math.ceil(Math.sqrt(count * 2))));
    const wide = Math.max(columns, single ? 0 : 5) * pitch, top = single ? 0 : LABEL;
    if (x > 0 && x + wide > width) { x = 0; y += tallest + GAP; tallest = 0; }
    if (!single) labels.push({ x, y, width: wide, text: group[0].failure_domain || "no domain" });
    let place = 0;
    for (const domain of group) domain.host_ids.forEach((host, number) => {
      cells.push({
        host, domain: domain.failure_domain, state: domain.states[number], job: domain.jobs[number], mark: domain.marks[number],
        x: x + (place % columns) * pitch, y: y + top + Math.floor(place / columns) * pitch,
      });
      place += 1;
    });
    tallest = Math.max(tallest, top + Math.ceil(count / columns) * pitch);
    x += wide + GAP;
  }
  return { cells, labels, pitch, height: y + tallest };
}

function trace(context, shape, size) {
  const middle = size / 2, radius = size * 0.4;
  context.beginPath();
  if (shape === "circle") context.arc(middle, middle, radius, 0, 2 * Math.PI);
  else if (shape === "square") context.rect(middle - radius, middle - radius, 2 * radius, 2 * radius);
  else {
    const points = shape === "triangle" ? [[0, -1], [1, 0.85], [-1, 0.85]] : [[0, -1.15], [1.15, 0], [0, 1.15], [-1.15, 0]];
    for (const [dx, dy] of points) context.lineTo(middle + dx * radius, middle + dy * radius);
    context.closePath();
  }
}

/** Return a small picture of a state, with the mark of why its ranks should leave ('': none). */
export function picture(state, mark, size, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = Math.ceil(size * scale);
  const context = canvas.getContext("2d"), look = STATES[state] ?? { colour: "--quiet", shape: "circle", filled: false };
  const inner = mark ? size * 0.72 : size, edge = ((size - inner) / 2) * scale;
  context.setTransform(scale, 0, 0, scale, edge, edge);
  context.fillStyle = context.strokeStyle = colourOf(look.colour);
  context.lineWidth = Math.max(1.2, size / 9);
  context.globalAlpha = look.faint && !mark ? 0.55 : 1;
  trace(context, look.shape, inner);
  if (look.filled) context.fill(); else context.stroke();
  if (mark) {
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.strokeStyle = colourOf(MARKS[mark]?.colour ?? "--quiet");
    context.lineWidth = 1.5;
    context.strokeRect(1, 1, size - 2, size - 2);
  }
  return canvas;
}

function prepared(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, scale];
}

/** Draw all cells. */
export function drawMap(canvas, map, width) {
  const [context, scale] = prepared(canvas, width, map.height);
  const size = map.pitch - 2, pictures = new Map();
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillStyle = colourOf("--quiet");
  for (const label of map.labels) context.fillText(label.text, label.x, label.y, label.width);
  for (const cell of map.cells) {
    const key = `${cell.state} ${cell.mark}`;
    if (!pictures.has(key)) pictures.set(key, picture(cell.state, cell.mark, size, scale));
    context.drawImage(pictures.get(key), cell.x, cell.y, size, size);
  }
}

/** Draw a frame around the cell that the pointer is at, and a stronger one around the chosen cell. */
export function drawFrames(canvas, map, width, pointed, chosen) {
  const [context] = prepared(canvas, width, map.height);
  for (const [cell, name, line] of [[chosen, "--accent", 2.5], [pointed, "--text", 1.5]]) {
    if (!cell) continue;
    context.strokeStyle = colourOf(name);
    context.lineWidth = line;
    context.strokeRect(cell.x - 1.5, cell.y - 1.5, map.pitch + 1, map.pitch + 1);
  }
}

/** Return the cell at a point, or null. */
export function cellAt(map, x, y) {
  return map.cells.find((cell) => x >= cell.x && x < cell.x + map.pitch && y >= cell.y && y < cell.y + map.pitch) ?? null;
}

/** Return the nearest cell in a direction: dx or dy is -1 or 1. */
export function neighbour(map, from, dx, dy) {
  if (dx) return map.cells[map.cells.indexOf(from) + dx] ?? from;
  let best = from, bestAway = Infinity;
  for (const cell of map.cells) {
    const ahead = (cell.y - from.y) * dy;
    if (ahead < map.pitch / 2) continue;
    const away = ahead * 4 + Math.abs(cell.x - from.x);
    if (away < bestAway) [best, bestAway] = [cell, away];
  }
  return best;
}
