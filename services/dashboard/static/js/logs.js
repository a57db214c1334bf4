// A rank's log, which stays on the rank's host until somebody asks for it: its end, a text in it, or all of it as a file.

import { get } from "./api.js";
import { byId, counted, element } from "./dom.js";
import { repeat } from "./live.js";

const END_BYTES = 8192; // shown without a search
const PIECE_BYTES = 262144, MOST_BYTES = 64 * 1024 * 1024; // of a search or a download
const MOST_FOUND = 500; // lines, the newest ones

const bytesOf = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
const textOf = (bytes) => new TextDecoder().decode(bytes);

/** Fetch a piece of a log. If this generation has none on that host, the newest one's, where the rank is now. */
async function piece(job, { rank, generation, host }, query) {
  const ask = (which) => get(`jobs/${encodeURIComponent(job)}/logs`, { rank, ...query, ...which });
  try {
    return await ask({ generation, host });
  } catch (error) {
    if (error.status !== 404 || generation < 0) throw error;
    return ask({});
  }
}

/** Fetch all of a log, or its last MOST_BYTES, as pieces of bytes. `told(done, of)` is called after each. */
async function all(job, wanted, told) {
  const end = await piece(job, wanted, { offset: -1, limit: 1 });
  const pieces = [], from = Math.max(0, end.size_bytes - MOST_BYTES);
  const same = { ...wanted, generation: end.generation, host: end.host_id };
  for (let offset = from; offset < end.size_bytes;) {
    const next = await piece(job, same, { offset, limit: PIECE_BYTES });
    if (next.next_offset <= offset) break;
    pieces.push(bytesOf(next.data));
    offset = next.next_offset;
    told(offset - from, end.size_bytes - from);
  }
  return { pieces, from, generation: end.generation, host: end.host_id };
}

/** Show the log of the rank that is chosen in #log-rank, and of the one that is chosen next. Without a generation: the
 *  newest one's, as the job restarts and moves. With a text in #log-find: the lines that have it. */
export function showLogs(job, generation = -1) {
  const choice = byId("log-rank");
  if (!choice) return;
  const log = byId("log"), find = byId("log-find"), save = byId("log-save");
  let asked = 0;
  const about = (text) => { byId("log-about").textContent = text; };
  const chosen = () => ({ rank: Number(choice.value), generation, host: choice.selectedOptions[0].dataset.host });
  const progress = (done, of) => about(`${Math.round((100 * done) / of)} % of ${(of / 1048576).toFixed(1)} MiB fetched`);

  /** Do what is wanted last; say what went wrong. */
  const latest = async (work) => {
    const mine = (asked += 1);
    try {
      await work(() => mine === asked);
    } catch (error) {
      if (mine !== asked) return;
      about([error.message, error.hint].filter(Boolean).join(" Next step: "));
      log.textContent = "";
    }
  };

  const showEnd = () => latest(async (isWanted) => {
    const last = await piece(job, chosen(), { offset: -END_BYTES, limit: END_BYTES });
    if (!isWanted()) return;
    const text = textOf(bytesOf(last.data));
    const whole = (last.offset > 0 ? text.slice(text.indexOf("\n") + 1) : text) || "It is empty.";
    about(`generation ${last.generation} on ${last.host_id}`);
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 20;
    if (log.textContent === whole) return;
    log.textContent = whole;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  });

  const showFound = () => latest(async (isWanted) => {
    const wanted = find.value.toLowerCase();
    const { pieces, from, generation: of, host } = await all(job, chosen(), (...done) => { if (isWanted()) progress(...done); });
    if (!isWanted()) return;
    const lines = textOf(new Uint8Array(await new Blob(pieces).arrayBuffer())).split("\n");
    const found = lines.map((line, i) => [i + 1, line]).filter(([, line]) => line.toLowerCase().includes(wanted));
    const shown = found.slice(-MOST_FOUND);
    about(`${counted(found.length, "line")} of generation ${of} on ${host}${shown.length < found.length ? `, the newest ${MOST_FOUND}` : ""}${from ? ", of its last 64 MiB" : ""}`);
    log.textContent = shown.map(([number, line]) => `${from ? "" : `${number}: `}${line}`).join("\n") || "No line has it.";
  });

  const download = () => latest(async () => {
    save.disabled = true;
    try {
      const { pieces, generation: of } = await all(job, chosen(), progress);
      const link = element("a");
      link.href = URL.createObjectURL(new Blob(pieces, { type: "text/plain" }));
      link.download = `${job}-generation${of}-rank${choice.value}.log`;
      link.click();
      URL.revokeObjectURL(link.href);
    } finally {
      save.disabled = false;
    }
  });

  const show = () => (find.value ? showFound() : showEnd());
  choice.addEventListener("change", () => { log.textContent = ""; show(); });
  find.addEventListener("change", show);
  find.addEventListener("search", show);
  save.addEventListener("click", download);
  repeat("log", async () => { if (!find.value && !save.disabled) await showEnd(); });
}
