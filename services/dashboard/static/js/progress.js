// The charts of a job: its steps and its loss over time, with the outages of incidents shaded.

import { counted, drawing, words } from "./dom.js";
import { moment } from "./times.js";

const MAX_POINTS = 1500;
const HEIGHT = 190, RIGHT = 10, TOP = 8, BOTTOM = 24;
const LEAST_LEFT = 52, DIGIT = 7.2; // room for the labels of the axis
const LABEL_ROOM = 22; // of an incident's number in the band above the chart

/** Room at the left for these labels, uncut. */
const roomFor = (...labels) => Math.max(LEAST_LEFT, 12 + DIGIT * Math.max(...labels.map((label) => String(label).length)));

const lossText = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : String(value));

export class Progress {
  constructor(stepsBox, lossBox) {
    this.stepsBox = stepsBox;
    this.lossBox = lossBox;
    this.points = []; // {at, step, generation}
    this.losses = new Map(); // step -> loss; a repeated step replaces its earlier loss
    this.outages = []; // {id, cause, from, to}
    this.beside = null; // another job's Progress, with its name
    this.drawn = "";
  }

  /** Keep the steps of all ranks together or, in older logs, of rank 0: data-parallel ranks step together. */
  add(event) {
    if (event.rank > 0) return;
    if (Number.isFinite(event.data.loss)) this.losses.set(event.data.loss_step, event.data.loss);
    if (this.losses.size > MAX_POINTS) this.losses = new Map([...this.losses].filter((_, i) => i % 2 === 1));
    event.data.completed_at.forEach((at, i) => this.points.push({ at, step: event.data.first_step + i, generation: event.generation }));
    if (this.points.length > MAX_POINTS) {
      // Keep half the points of the older half, and the last step before each restart.
      const old = this.points.length / 2;
      this.points = this.points.filter((point, i, all) => i >= old || i % 2 === 0 || all[i + 1].generation !== point.generation);
    }
  }

  /** Compare with another job, of which these are events; '': with none. */
  showBeside(name, events) {
    this.beside = name ? Object.assign(new Progress(null, null), { name }) : null;
    for (const event of events) this.beside.add(event);
    this.draw();
  }

  /** The rate of the steps that are known: the middle one, so that outages do not count. */
  get stepsPerSecond() {
    const points = this.points.toSorted((a, b) => a.at - b.at);
    const rates = points.slice(1).map((point, i) => (point.step - points[i].step) / (point.at - points[i].at)).filter((rate) => rate > 0 && Number.isFinite(rate)).sort((a, b) => a - b);
    return rates[Math.floor(rates.length / 2)] ?? 0;
  }

  /** Both jobs in words. */
  compared() {
    if (!this.beside) return "";
    const of = (one) => `${one.stepsPerSecond.toPrecision(3)} steps/s${one.losses.size ? `, loss ${lossText([...one.losses].at(-1)[1])} at step ${[...one.losses].at(-1)[0]}` : ""}`;
    return `dashed: ${this.beside.name}, ${of(this.beside)}; this one: ${of(this)}`;
  }

  /** An outage lasts from its fault, not from its detection, where goodput knows it, to the first step after it. */
  showOutages(incidents, goodput) {
    const measured = new Map((goodput?.incidents ?? []).map((one) => [one.incident_id, one]));
    this.outages = incidents.map((incident) => {
      const known = measured.get(incident.incident_id);
      const from = known?.began_at ?? incident.fault_at;
      const to = known?.resumed_s !== null && known?.resumed_s !== undefined ? from + known.resumed_s : incident.resolved_at;
      return { id: incident.incident_id, cause: words(incident.cause), from, to };
    });
    this.draw();
  }

  draw() {
    const points = [...this.points].sort((a, b) => a.at - b.at);
    const key = JSON.stringify([this.stepsBox.clientWidth, points.length, points.at(-1), this.outages, this.losses.size, this.beside?.name]);
    if (key === this.drawn) return;
    this.drawn = key;
    if (points.length < 2) {
      this.stepsBox.replaceChildren("Steps appear here once the first are completed.");
      return;
    }
    this.stepsBox.replaceChildren(this.#steps(points));
    const losses = [...this.losses].sort(([a], [b]) => a - b);
    if (losses.length > 1) this.lossBox.replaceChildren(this.#losses(losses));
  }

  #steps(points) {
    const width = Math.max(300, this.stepsBox.clientWidth);
    const [from, to] = [points[0].at, Math.max(points.at(-1).at, ...this.outages.filter((one) => !one.to).map(() => Date.now() / 1000))];
    const steps = points.map((point) => point.step);
    const [low, high] = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
    const LEFT = roomFor(low, high);
    const x = (at) => LEFT + ((at - from) / Math.max(to - from, 1e-3)) * (width - LEFT - RIGHT);
    const top = TOP + LABEL_ROOM, bottom = HEIGHT - BOTTOM;
    const y = (step) => top + (1 - (step - low) / (high - low)) * (bottom - top);
    const shown = this.outages.filter((one) => (one.to ?? to) >= from);
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "group", "aria-label": `Steps ${low} to ${high} over time, with ${counted(shown.length, "incident")} marked` });
    svg.append(drawing("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }));
    let free = LEFT; // where the next label has room; others are on hover, and in the list below
    for (const one of shown.toSorted((a, b) => a.from - b.from)) {
      const [left, right] = [x(Math.max(from, one.from)), x(Math.min(to, one.to ?? to))];
      const title = drawing("title", {}, `${one.id} ${one.cause}`);
      const mark = drawing("a", { href: `/incidents/${one.id}`, "aria-label": `${one.id} ${one.cause}` }, title);
      mark.append(drawing("rect", { class: "outage", x: left, y: top, width: Math.max(2, right - left), height: bottom - top }));
      mark.append(drawing("line", { class: "outage-edge", x1: left, x2: left, y1: top - 4, y2: bottom }));
      const wide = `${one.id} ${one.cause}`.length * 6.6, narrow = one.id.length * 6.8;
      const room = (length) => left >= free && left + length <= width - RIGHT;
      const before = left - narrow >= free; // at the right edge the label stands left of its mark
      if (room(wide) && wide < 0.4 * width) { mark.append(drawing("text", { x: left, y: top - 10 }, `${one.id} ${one.cause}`)); free = left + wide + 10; }
      else if (room(narrow)) { mark.append(drawing("text", { x: left, y: top - 10 }, one.id)); free = left + narrow + 10; }
      else if (before && left + narrow > width - RIGHT) { mark.append(drawing("text", { x: width - RIGHT, y: top - 10, "text-anchor": "end" }, one.id)); free = width; }
      svg.append(mark);
    }
    for (const generation of new Set(points.map((point) => point.generation))) {
      const line = points.filter((point) => point.generation === generation).map((point) => `${x(point.at).toFixed(1)},${y(point.step).toFixed(1)}`);
      svg.append(drawing("polyline", { class: "steps", points: line.join(" ") }));
    }
    const at = (seconds) => moment(new Date(seconds * 1000));
    svg.append(
      drawing("text", { x: LEFT - 6, y: y(high) + 5, "text-anchor": "end" }, high), drawing("text", { x: LEFT - 6, y: y(low), "text-anchor": "end" }, low),
      drawing("text", { x: LEFT, y: HEIGHT - 6 }, at(from)), drawing("text", { x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, at(to)),
    );
    return svg;
  }

  #losses(losses) {
    const width = Math.max(300, this.lossBox.clientWidth), height = 110;
    const others = [...(this.beside?.losses ?? [])].sort(([a], [b]) => a - b).filter(([, value]) => Number.isFinite(value));
    const both = [...losses, ...others];
    const values = both.map(([, value]) => value);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const [first, last] = [Math.min(...both.map(([step]) => step)), Math.max(...both.map(([step]) => step))];
    const LEFT = roomFor(lossText(low), lossText(high));
    const line = (name, pairs) => drawing("polyline", { class: name, points: pairs.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") });
    const x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (height - BOTTOM - TOP);
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Loss from step ${first} to ${last}, between ${lossText(low)} and ${lossText(high)}` });
    svg.append(
      drawing("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM }),
      ...(others.length > 1 ? [line("loss beside", others)] : []), line("loss", losses),
      drawing("text", { x: LEFT - 6, y: y(high) + 5, "text-anchor": "end" }, lossText(high)), drawing("text", { x: LEFT - 6, y: y(low), "text-anchor": "end" }, lossText(low)),
      drawing("text", { x: LEFT, y: height - 6 }, `loss, step ${first}`), drawing("text", { x: width - RIGHT, y: height - 6, "text-anchor": "end" }, `step ${last}`),
    );
    return svg;
  }
}
