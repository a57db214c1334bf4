// Requests to /v1/... of the supervisor. What changes something carries the CSRF token, which operators' browsers have.

import { csrfToken } from "./session.js";

/** A refused or failed request. `problem`: the problem details of the answer, if it has some. */
class Refused extends Error {
  constructor(status, problem) {
    super(problem?.detail ?? `the supervisor answered ${status}`);
    this.status = status;
    this.hint = problem?.hint ?? "";
    this.problem = problem;
  }
}

function addressOf(path, query) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const one of [value].flat()) parameters.append(name, one);
  const text = parameters.toString();
  return `/v1/${path}${text ? `?${text}` : ""}`;
}

async function answerOf(response) {
  if (response.ok) return response.status === 204 ? null : response.json();
  const problem = await response.json().catch(() => null);
  if (response.status === 401) throw new Refused(401, { detail: "logged out: reload the page and log in" });
  throw new Refused(response.status, problem);
}

/** Return the answer to a GET. Throws Refused. */
export async function get(path, query = {}) {
  return answerOf(await fetch(addressOf(path, query), { headers: { Accept: "application/json" } }));
}

/** Change something: `send("POST", "hosts/host-a/drain", { body: {...}, query: { dry_run: true } })`. A repetition with
 *  the same `key` changes nothing more. Throws Refused. */
export async function send(method, path, { body, query = {}, key = "" } = {}) {
  const headers = { Accept: "application/json", "X-CSRF-Token": csrfToken() };
  if (key) headers["Idempotency-Key"] = key;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  return answerOf(await fetch(addressOf(path, query), { method, headers, body: sent }));
}
