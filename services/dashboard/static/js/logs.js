// The last lines of a rank's log, which stays on the rank's host until somebody asks for it.

import { get } from "./api.js";
import { byId } from "./dom.js";
import { repeat } from "./live.js";

const PIECE_BYTES = 8192;

function textOf(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new TextDecoder().decode(bytes);
}

/** Fetch the end of a log. If this generation has none on that host, the newest one's, where the rank is now. */
async function newest(job, rank, generation, host) {
  const ask = (query) => get(`jobs/${encodeURIComponent(job)}/logs`, { rank, offset: -PIECE_BYTES, limit: PIECE_BYTES, ...query });
  try {
    return await ask({ generation, host });
  } catch (error) {
    if (error.status !== 404 || generation < 0) throw error;
    return ask({});
  }
}

/** Show the log of the rank that is chosen in #log-rank, and of the one that is chosen next. Without a generation: the
 *  newest one's, as the job restarts and moves. */
export function showLogs(job, generation = -1) {
  const choice = byId("log-rank");
  if (!choice) return;
  let asked = 0;
  const show = async () => {
    const mine = (asked += 1);
    const { value: rank, dataset: { host } } = choice.selectedOptions[0];
    try {
      const piece = await newest(job, Number(rank), generation, host);
      if (mine !== asked) return;
      const text = textOf(piece.data);
      const whole = piece.offset > 0 ? text.slice(text.indexOf("\n") + 1) : text;
      byId("log-about").textContent = `generation ${piece.generation} on ${piece.host_id}`;
      const log = byId("log");
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 20;
      if (log.textContent === (whole || "It is empty.")) return;
      log.textContent = whole || "It is empty.";
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    } catch (error) {
      if (mine !== asked) return;
      byId("log-about").textContent = [error.message, error.hint].filter(Boolean).join(" Next step: ");
      byId("log").textContent = "";
    }
  };
  choice.addEventListener("change", () => { byId("log").textContent = ""; show(); });
  repeat("log", show);
}
