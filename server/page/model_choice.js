// The choice of the model or adapter of the next request.

import { byId } from "./dom.js";
import { shortName } from "./format.js";
import { onServer, server } from "./server_state.js";
import { rememberModel, settings } from "./settings.js";
import { drawWelcome } from "./welcome.js";

function draw() {
  if (!server.facts) return;
  // The first names are all names of the model, the others of adapters.
  const { models: [model, ...others], num_names } = server.facts;
  const models = [model, ...others.slice(num_names - 1)];
  const welcome = document.querySelector(".welcome");
  if (welcome) drawWelcome(welcome);
  if (!models.includes(settings.model)) settings.model = models[0];
  const choice = byId("model-choice");
  choice.hidden = models.length < 2;
  byId("attach").hidden = !server.facts.takes_images;
  // Drawn anew only when it changed: the list may be open.
  if ([...choice.options].map((option) => option.value).join("\n") !== models.join("\n")) {
    choice.replaceChildren(...models.map((name) => new Option(shortName(name), name)));
  }
  choice.value = settings.model;
}

export function setUpModelChoice() {
  byId("model-choice").addEventListener("change", (event) => rememberModel(event.target.value));
  onServer(draw);
}
