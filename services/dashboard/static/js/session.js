// Login and logout, on every page. The server's redirect after a login ends in #operator=TOKEN, with the CSRF token of an
// operator's session, or in #operator= for a reader's.

const KEPT = "flyball-operator";

/** The CSRF token of this browser, '' for a reader. */
export const csrfToken = () => localStorage.getItem(KEPT) ?? "";

/** Whether this browser logged in as an operator. */
export const isOperator = () => csrfToken() !== "";

const forget = () => localStorage.removeItem(KEPT);

/** The role that the supervisor gives this browser with this CSRF token; '' if it does not say. */
async function roleWith(token) {
  try {
    const response = await fetch("/session", { headers: { "X-CSRF-Token": token } });
    return response.ok ? (await response.json()).role : "";
  } catch {
    return "";
  }
}

/** Take the CSRF token out of the address. Any link may have such an end, so the supervisor says which token is true. */
async function takeOperator() {
  const given = /^#operator=([\w-]*)$/.exec(location.hash);
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  if (given[1] && (await roleWith(given[1])) === "operator") localStorage.setItem(KEPT, given[1]);
  else if (isOperator() && (await roleWith(csrfToken())) === "reader") forget();
}

document.getElementById("logout")?.addEventListener("submit", forget);
await takeOperator();
