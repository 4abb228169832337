// The settings dialog: system prompt, sampling, tools.

import { byId } from "./dom.js";
import { loadSettings, saveSettings } from "./storage.js";

export const settings = loadSettings();

const FIELDS = { system: "system", temperature: "temperature", "max-tokens": "maxTokens", tools: "tools" };

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
    try {
      parseTools(byId("tools").value);
    } catch (error) {
      event.preventDefault();
      byId("settings-error").textContent = error.message;
      byId("tools").focus();
      return;
    }
    for (const [id, name] of Object.entries(FIELDS)) settings[name] = byId(id).value;
    settings.maxTokens = Number(settings.maxTokens);
    settings.endsRepeats = byId("ends-repeats").checked;
    saveSettings(settings);
  });
}
