// The settings dialog: system prompt, sampling, tools, other fields of a request.

import { byId } from "./dom.js";
import { loadSettings, saveSettings } from "./storage.js";

export const settings = loadSettings();

const FIELDS = { system: "system", temperature: "temperature", "max-tokens": "maxTokens", tools: "tools", "other-fields": "others", theme: "theme" };
// Fields that the page sets itself. A second choice would be written into the same answer.
export const OWN_FIELDS = ["model", "messages", "max_tokens", "temperature", "tools", "stream", "stream_options", "n"];

// The style sheet follows the system unless the attribute names a theme.
const drawTheme = () => (document.documentElement.dataset.theme = settings.theme);

export function rememberModel(model) {
  settings.model = model;
  saveSettings(settings);
}

// The list of tools, or an empty one. Raises an Error that says what is wrong.
export function parseTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools are not a list; write [ before and ] after them.");
  return tools;
}

// The other fields of a request, or an empty object. Raises an Error that says what is wrong.
export function parseOthers(text) {
  if (!text.trim()) return {};
  let others;
  try {
    others = JSON.parse(text);
  } catch (error) {
    throw new Error(`The other fields are not JSON: ${error.message}`);
  }
  if (others === null || typeof others !== "object" || Array.isArray(others)) {
    throw new Error("The other fields are not a JSON object; write { before and } after them.");
  }
  const own = Object.keys(others).filter((name) => OWN_FIELDS.includes(name));
  if (own.length) throw new Error(`The page sets ${own.join(", ")} itself: leave it out of the other fields.`);
  return others;
}

// A field of the dialog, and what reads its text.
const CHECKS = { tools: parseTools, "other-fields": parseOthers };

export function setUpSettings() {
  const dialog = byId("settings");
  byId("open-settings").addEventListener("click", () => {
    for (const [id, name] of Object.entries(FIELDS)) byId(id).value = settings[name];
    byId("ends-repeats").checked = settings.endsRepeats;
    byId("settings-error").textContent = "";
    dialog.showModal();
  });
  byId("cancel-settings").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", (event) => {
    for (const [id, parse] of Object.entries(CHECKS)) {
      try {
        parse(byId(id).value);
      } catch (error) {
        event.preventDefault();
        byId("settings-error").textContent = error.message;
        byId(id).focus();
        return byId("settings-error").scrollIntoView({ block: "nearest" });
      }
    }
    for (const [id, name] of Object.entries(FIELDS)) settings[name] = byId(id).value;
    settings.maxTokens = Number(settings.maxTokens);
    settings.endsRepeats = byId("ends-repeats").checked;
    saveSettings(settings);
    drawTheme();
  });
  drawTheme();
}
