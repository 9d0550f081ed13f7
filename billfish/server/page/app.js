// Wires the page: views, settings, key, colours, and what its buttons do.

import { json, key } from "./api.js";
import { Chat } from "./chat.js";
import { EnginePanel } from "./engine.js";

const element = (id) => document.getElementById(id);
const wide = matchMedia("(min-width: 60rem)");
const remembered = (name) => {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // storage may be switched off
  }
};
const remember = (name, value) => {
  try {
    localStorage.setItem(name, value);
  } catch {
    // then it is forgotten
  }
};

// Views: on a narrow screen one at a time, on a wide one the chat beside one of the others.

const tabs = [...document.querySelectorAll('[role="tab"]')];
let view = "chat";

function show(name) {
  view = name === "chat" && wide.matches ? "engine" : name;
  document.body.dataset.view = view;
  for (const tab of tabs) {
    const selected = tab.dataset.view === view;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
  }
  panel.poll();
  panel.redraw();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => show(tab.dataset.view));
  tab.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const shown = tabs.filter((each) => each.offsetParent !== null);
    const to = shown[(shown.indexOf(tab) + move + shown.length) % shown.length];
    show(to.dataset.view);
    to.focus();
  });
}
wide.addEventListener("change", () => show(wide.matches ? view : "chat"));

// Colours: the system's, or the user's own choice.

const THEMES = { system: ["◐", "as the system"], light: ["○", "light"], dark: ["●", "dark"] };

function paint(theme) {
  const [sign, words] = THEMES[theme];
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  element("theme").textContent = sign;
  for (const name of ["aria-label", "title"]) {
    element("theme").setAttribute(name, `Colours: ${words}`);
  }
}

let theme = Object.hasOwn(THEMES, remembered("billfish-theme")) ? remembered("billfish-theme") : "system";
paint(theme);
element("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  remember("billfish-theme", theme);
  paint(theme);
  panel.redraw();
});

// Settings: only those that are filled in are sent.

const form = element("sampling");

function restore() {
  try {
    const saved = JSON.parse(remembered("billfish-settings") ?? "{}");
    for (const field of form.elements) if (field.name in saved) field.value = saved[field.name];
  } catch {
    // what cannot be read is forgotten
  }
}

const filled = () => [...form.elements].filter((field) => field.name && field.value.trim());
form.addEventListener("input", () => {
  const values = Object.fromEntries(filled().map((field) => [field.name, field.value]));
  remember("billfish-settings", JSON.stringify(values));
});
form.addEventListener("reset", () => remember("billfish-settings", "{}"));
form.addEventListener("submit", (event) => event.preventDefault());
restore();

const settings = {
  model: null,
  findModel,
  get system() {
    return element("system").value.trim();
  },
  get options() {
    const numbers = filled().filter((field) => field.type === "number");
    return Object.fromEntries(numbers.map((field) => [field.name, Number(field.value)]));
  },
};

/** Whether all are as they should be; if not, says which is not. */
function settingsAreRight() {
  if (form.checkValidity()) return true;
  show("settings");
  form.reportValidity();
  return false;
}

async function findModel() {
  const { data } = await json("v1/models");
  settings.model = data[0].id;
  element("model").textContent = settings.model;
  document.title = `${settings.model} · Billfish`;
  for (const [name, value] of Object.entries(data[0].default_sampling)) {
    const field = form.elements[name];
    if (field) field.placeholder = String(value);
  }
}

// The API key.

const dialog = element("key-dialog");
let afterKey = null;

element("key-button").hidden = !key.get(); // most servers want none

function askForKey(why, then = null) {
  element("key-button").hidden = false;
  afterKey = then ?? afterKey;
  if (why) element("key-why").textContent = `${why} It is kept in this tab only, until you close it.`;
  if (!dialog.open) {
    element("key").value = key.get();
    dialog.showModal();
  }
}

element("key-button").addEventListener("click", () => askForKey(""));
element("key-cancel").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", () => { afterKey = null; });
element("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key.set(element("key").value.trim());
  declined = false;
  const then = afterKey;
  dialog.close();
  await panel.poll();
  if (then) await then();
});

// The engine's state, above all where it hinders.

const NAMES = {
  starting: "Loading", ready: "Ready", busy: "Busy", dead: "Not running", lost: "No connection",
};

function showState(state, words) {
  element("state").dataset.state = state;
  if (element("state-text").textContent !== NAMES[state]) element("state-text").textContent = NAMES[state];
  const notice = element("notice");
  notice.hidden = words === null;
  if (words !== null && notice.textContent !== words) notice.textContent = words;
  if (settings.model === null && (state === "ready" || state === "busy")) {
    findModel().catch(() => {});
  }
}

let declined = false; // a dialog that was put away does not come back by itself
const panel = new EnginePanel({
  visible: () => view === "engine",
  onKey: (why) => {
    if (declined) return;
    declined = true;
    askForKey(why);
  },
  onState: showState,
});

// The chat.

const message = element("message");
const chat = new Chat({
  transcript: element("transcript"),
  welcome: element("welcome"),
  settings,
  onKey: askForKey,
  onRequest: (id) => panel.own(id),
  onBusy: (busy) => {
    element("send").hidden = busy;
    element("stop").hidden = !busy;
    if (!busy && [document.body, element("stop")].includes(document.activeElement)) message.focus();
  },
});

function fit() {
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight + 2, 200)}px`;
}

async function send(text) {
  if (!text.trim() || chat.busy || !settingsAreRight()) return;
  message.value = "";
  fit();
  await chat.send(text.trim());
}

message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(message.value);
  }
});
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(message.value);
});
element("stop").addEventListener("click", () => chat.stop());
element("clear").addEventListener("click", () => {
  chat.clear();
  message.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !dialog.open) chat.stop();
});
for (const example of element("examples").querySelectorAll("button")) {
  example.addEventListener("click", () => send(example.textContent));
}

show("chat");
