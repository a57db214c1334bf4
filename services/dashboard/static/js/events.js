// Events of the log in words.

import { counted, words } from "./dom.js";
import { duration } from "./times.js";

/* An event of one rank, or of several ranks of a host: then each value is a list. */
function restoredText({ rank, data }) {
  const all = (values) => [...new Set([values].flat())].filter((value) => value !== "").join(", ");
  const who = data.ranks ? `ranks ${all(data.ranks)} have` : `rank ${rank} has`;
  const hosts = all(data.source_host ?? "");
  const transports = all(data.transport ?? "").toUpperCase();
  const longest = Math.max(...[data.seconds].flat());
  const from = `${all(data.source_tier)}${hosts ? ` of ${hosts}` : ""}${transports ? ` over ${transports}` : ""}`;
  return `${who} step ${all(data.step)} from ${from} in ${duration(longest)}`;
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

/** One line about an event. */
export const textOfEvent = (event) => DESCRIPTIONS[event.kind]?.(event) ?? words(event.kind);
