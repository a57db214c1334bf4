// What operators do, on every page: a button with `data-act` opens a dialog. It shows the plan that the supervisor would
// carry out (a dry run), and asks to type a name before anything changes. templates/acts.html makes the buttons.

import { send } from "./api.js";
import { byId, element, words } from "./dom.js";
import { refresh } from "./live.js";
import { isOperator } from "./session.js";

const MINUTES = 60, MAX_REASON = 500;
const reason = { name: "reason", label: "Reason (others see it)", type: "text", value: "", maxLength: MAX_REASON };
const minutes = (label, value) => ({ name: "minutes", label, type: "number", value, min: 1, max: 43200 });
const host = (target) => `hosts/${encodeURIComponent(target)}`;

// verb: on the button that does it; title: of the dialog; about: what it means; fields; request: method, path and body of the API.
const ACTS = {
  drain: {
    verb: "Drain it",
    title: (target) => `Drain ${target}`,
    about: "Its ranks save a step and move to a spare, and it gets no new work. No step is lost. Without a spare, its job stays.",
    fields: [minutes("Minutes until the drain is refused", 5), reason],
    request: (target, { minutes: wait, reason: why }) => ["POST", `${host(target)}/drain`, { within_s: wait * MINUTES, reason: why }],
  },
  cordon: {
    verb: "Cordon it",
    title: (target) => `Cordon ${target}`,
    about: "It gets no new work. Ranks that are there stay until their next restart.",
    fields: [reason],
    request: (target, { reason: why }) => ["POST", `${host(target)}/cordon`, { reason: why }],
  },
  uncordon: {
    verb: "Give it work",
    title: (target) => `Give ${target} work again`,
    about: "Whatever it was cordoned or drained for. A cordoned host must pass a check first.",
    fields: [],
    request: (target) => ["POST", `${host(target)}/uncordon`],
  },
  silence: {
    verb: "Silence it",
    title: (target) => `Silence ${target}`,
    about: "A maintenance window: the controller decides nothing because of this host until it is over.",
    fields: [minutes("Minutes", 30), reason],
    request: (target, { minutes: length, reason: why }) => ["POST", "silence", { host_id: target, for_s: length * MINUTES, reason: why }],
  },
  forget: {
    verb: "Forget it",
    title: (target) => `Forget ${target}`,
    about: "For a host that is gone for good. It is no longer listed; its incidents stay. If it reports again, it joins again.",
    fields: [],
    request: (target) => ["DELETE", host(target)],
  },
  approve: {
    verb: "Approve it",
    title: (target) => `Approve ${target}`,
    about: "The action that the incident waits for is carried out.",
    fields: [reason],
    request: (target, { reason: why }) => ["POST", "approve", { target, reason: why }],
  },
  stop: {
    verb: "Stop it",
    title: (target) => `Stop job ${target}`,
    about: "All ranks save the same step, and the job ends. The same command starts it again from there.",
    fields: [],
    request: (target) => ["POST", `jobs/${encodeURIComponent(target)}/stop`],
  },
  checkpoint: {
    verb: "Save it",
    title: (target) => `Save a checkpoint of ${target} now`,
    about: "All ranks save the same step, wait until the disk and persistent tiers have it, and train on.",
    fields: [reason],
    request: (target, { reason: why }) => ["POST", `jobs/${encodeURIComponent(target)}/checkpoint`, { reason: why }],
  },
};

// Works without TLS, too, where crypto.randomUUID does not exist.
const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

function labelled(field) {
  const input = Object.assign(document.createElement("input"), { id: `act-${field.name}`, name: field.name, autocomplete: "off" });
  for (const [name, value] of Object.entries(field)) if (name !== "label" && name !== "name") input[name] = value;
  return element("label", "", field.label, input);
}

function valuesOf(form, fields) {
  return Object.fromEntries(fields.map(({ name, type }) => [name, type === "number" ? form.elements[name].valueAsNumber : form.elements[name].value]));
}

/* The answer to a dry run, in words. */
function planOf(preview) {
  const lines = preview.decisions.map((decision) => element("p", "", element("b", "", words(decision.kind)), ` ${decision.reason}`));
  return lines.length ? lines : [element("p", "", "The controller would decide nothing at once.")];
}

const problemOf = (error) => [element("p", "", element("b", "", error.message)), error.hint ? element("p", "", `Next: ${error.hint}`) : null].filter(Boolean);

function open(name, target, expected) {
  const act = ACTS[name], dialog = byId("act"), key = newKey();
  const plan = element("div", "plan");
  plan.setAttribute("aria-live", "polite");
  const typed = labelled({ name: "typed", label: `Type ${expected} to confirm`, type: "text", spellcheck: false });
  const go = Object.assign(element("button", "primary", act.verb), { type: "submit", disabled: true });
  const cancel = Object.assign(element("button", "", "Cancel"), { type: "button", onclick: () => dialog.close() });
  const title = Object.assign(element("h2", "", act.title(target)), { id: "act-title" });
  const form = element("form", "", title, element("p", "", act.about), ...act.fields.map(labelled), plan, typed, element("p", "choices", cancel, go));
  let isPossible = false, asked = 0;

  const settle = () => { go.disabled = !isPossible || form.elements.typed.value !== expected; };

  async function preview() {
    const mine = ++asked;
    isPossible = false;
    plan.replaceChildren(element("p", "quiet", "Asking what would be done…"));
    try {
      const [method, path, body] = act.request(target, valuesOf(form, act.fields));
      const answer = await send(method, path, { body, query: { dry_run: true } });
      if (mine !== asked) return;
      isPossible = true;
      plan.replaceChildren(element("p", "quiet", "What would be done:"), ...planOf(answer));
    } catch (error) {
      if (mine === asked) plan.replaceChildren(...problemOf(error));
    }
    settle();
  }

  form.addEventListener("input", settle);
  form.addEventListener("change", (event) => { if (event.target.name !== "typed" && form.reportValidity()) preview(); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      const [method, path, body] = act.request(target, valuesOf(form, act.fields));
      await send(method, path, { body, key });
      dialog.close();
      refresh(0);
    } catch (error) {
      plan.replaceChildren(...problemOf(error));
      settle();
    }
  });
  dialog.replaceChildren(form);
  dialog.showModal();
  form.elements.typed.focus();
  preview();
}

document.documentElement.classList.toggle("operator", isOperator());
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button[data-act]");
  if (button) open(button.dataset.act, button.dataset.target, button.dataset.confirm || button.dataset.target);
});
