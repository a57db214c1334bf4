// Times and durations as people read them: local, with the zone and UTC on hover.

const clockFormat = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const dayFormat = new Intl.DateTimeFormat([], { month: "short", day: "numeric" });
const yearFormat = new Intl.DateTimeFormat([], { year: "numeric", month: "short", day: "numeric" });
const zoneName = new Intl.DateTimeFormat([], { timeZoneName: "short" }).formatToParts(new Date()).find((part) => part.type === "timeZoneName")?.value ?? "";

/** "14:03:07" */
export const clock = (date) => clockFormat.format(date);

/** "14:03:07" today, "Nov 20, 14:03:07" on another day */
export function moment(date, now = new Date()) {
  if (date.toDateString() === now.toDateString()) return clock(date);
  return `${(date.getFullYear() === now.getFullYear() ? dayFormat : yearFormat).format(date)}, ${clock(date)}`;
}

/** "Nov 20, 2026, 14:03:07 GMT+1 · 2026-11-20 13:03:07 UTC" */
export function whole(date) {
  return `${yearFormat.format(date)}, ${clock(date)} ${zoneName} · ${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** "3 s ago", "4 min ago", "2 h ago", "5 days ago" */
export function ago(date, now = new Date()) {
  const passed = Math.max(0, (now - date) / 1000);
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 5400) return `${Math.floor(passed / 60)} min ago`;
  return passed < 172800 ? `${Math.round(passed / 3600)} h ago` : `${Math.round(passed / 86400)} days ago`;
}

/** Write the times of a part of the page, which the server wrote in UTC. */
export function localise(root) {
  for (const node of root.querySelectorAll("time[data-time]")) {
    const date = new Date(node.dateTime);
    const text = node.dataset.time === "ago" ? ago(date) : node.dataset.time === "whole" ? `${yearFormat.format(date)}, ${clock(date)} ${zoneName}` : moment(date);
    if (node.textContent !== text) node.textContent = text;
    if (node.title !== whole(date)) node.title = whole(date);
  }
}

/** "0.41 s", "12.3 s", "4 min 5 s", "3 h 20 min" */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
