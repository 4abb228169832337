// Pictures of the message that is being written: chosen, pasted or dropped.

import { byId, element } from "./dom.js";
import { count } from "./format.js";
import { UndoLine } from "./undo.js";

const MAX_BYTES = 20 * 2 ** 20;
const removal = new UndoLine("removed");
let urls = [];
let say = () => {};

export const hasPictures = () => urls.length > 0;

export function takePictures() {
  const taken = urls;
  putPictures([]);
  return taken;
}

export function putPictures(given) {
  removal.clear();
  urls = given;
  draw();
}

export function picture(url) {
  return element("img", "", "", { src: url, alt: "Picture of the message" });
}

async function add(files) {
  if (byId("attach").hidden) return say("This model takes no pictures.");
  for (const file of files) {
    if (!file.type.startsWith("image/")) say(`${file.name} is not a picture.`);
    else if (file.size > MAX_BYTES) say(`${file.name} has ${count(file.size)} bytes, at most ${count(MAX_BYTES)} are allowed.`);
    else urls.push(await dataUrl(file));
  }
  draw();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function draw() {
  byId("pictures").replaceChildren(...urls.map((url, index) => {
    const remove = element("button", "", "", { type: "button", title: "Remove this picture", "aria-label": `Remove picture ${index + 1}` });
    remove.append(picture(url));
    remove.addEventListener("click", () => {
      urls.splice(index, 1);
      draw();
      byId("question").focus();
      removal.offer("Removed the picture.", () => {
        urls.splice(index, 0, url);
        draw();
        byId("question").focus();
      });
    });
    return remove;
  }));
}

// `show` tells the reader why a picture is not taken.
export function setUpPictures(show) {
  say = show;
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", () => {
    add([...byId("files").files]);
    byId("files").value = "";
  });
  const view = byId("chat-view");
  view.addEventListener("dragover", (event) => event.preventDefault());
  view.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) add([...event.dataTransfer.files]);
  });
  byId("question").addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) add([...event.clipboardData.files]);
  });
}
