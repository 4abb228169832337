// The chat: one conversation at a time, and the answer that is being streamed into it.

import { hint, putContent, setStreaming, setUpComposer, showFailure, takeContent } from "./composer.js";
import { newChat, pendingCall } from "./conversation.js";
import { drawList, setUpList } from "./conversation_list.js";
import { byId, paced } from "./dom.js";
import { cancelEdit, isEditing, startEdit, takeEdit } from "./editing.js";
import { setUpExport } from "./export.js";
import { clearWhenReady, fail, words } from "./failures.js";
import { count, shorten } from "./format.js";
import { AnswerView, questionView, textOf } from "./message_view.js";
import { setUpModelChoice } from "./model_choice.js";
import { repeats } from "./repetition.js";
import { chatBody, fitToContext } from "./request_body.js";
import { follow, setUpScrolling, toEnd } from "./scrolling.js";
import { onServer, refresh, server, trouble } from "./server_state.js";
import { settings, setUpSettings } from "./settings.js";
import { deleteConversation, MAX_CHARACTERS, restoreConversation, saveConversation } from "./storage.js";
import { isEmpty, newAnswer, stream } from "./stream.js";
import { UndoLine } from "./undo.js";
import { welcome } from "./welcome.js";

const MAX_TITLE = 60;

const replacement = new UndoLine("replaced");
const unsaved = new UndoLine("unsaved", "Close");
// The conversation whose notice "not saved" was closed.
let closedFor = null;
let chat = newChat();
// The AbortController of the answer that is being written.
let writing = null;

function draw() {
  const { messages } = chat;
  byId("messages").replaceChildren(...(messages.length ? messages.map(view) : [welcome(ask)]));
  byId("title").textContent = messages.length ? chat.title : "";
  for (const id of ["copy-curl", "copy-python", "export"]) byId(id).disabled = !messages.length;
  byId("question").placeholder = pendingCall(chat) ? `Result of ${pendingCall(chat).function.name}` : "Message";
  drawList(chat.id);
}

function view(message, index) {
  if (message.role !== "assistant") return questionView(message, message.role === "user" ? () => edit(index) : null);
  const answer = new AnswerView(message, index === chat.messages.length - 1 ? retry : null);
  answer.update(false);
  return answer.root;
}

function ask(content) {
  if (!server.facts) {
    putContent(content);
    const isLocked = server.status === "key needed";
    return fail(isLocked ? "The server requires an API key; enter it above." : trouble() || "The server has not answered yet.");
  }
  return isEditing() ? askEdited(content) : append(content, [...chat.messages]);
}

// If no answer comes, the conversation is as `before`.
function append(content, before) {
  const call = pendingCall(chat);
  if (!chat.messages.length && !chat.isNamed) chat.title = shorten(textOf({ content }), MAX_TITLE) || "Picture";
  chat.messages.push(call ? { role: "tool", tool_call_id: call.id, content } : { role: "user", content });
  if (pendingCall(chat)) return draw();
  return write(before, content);
}

function edit(index) {
  if (writing) return hint("An answer is being written. Stop it (Escape) or wait, then edit.");
  cancelEdit();
  startEdit(index, takeContent());
  putContent(chat.messages[index].content);
}

// Asks again from the edited question on. The earlier messages can be brought back until the next answer.
async function askEdited(content) {
  const { index, draft } = takeEdit(), asked = chat, { title } = chat, before = [...chat.messages];
  chat.messages = before.slice(0, index);
  await append(content, before);
  if (asked.messages === before) {
    asked.title = title;
    keep(asked);
    drawList(chat.id);
    if (asked === chat) return startEdit(index, draft);
  }
  if (draft) putContent(draft);
  if (asked === chat) offerMessages("The earlier messages were replaced.", before, title);
}

function offerMessages(text, messages, title) {
  replacement.offer(text, () => {
    Object.assign(chat, { messages, title });
    keep(chat);
    draw();
    byId("question").focus();
  });
}

async function retry() {
  if (writing) return;
  const before = [...chat.messages], retried = chat;
  chat.messages.pop();
  await write(before, "");
  if (retried !== chat || chat.messages === before) return;
  offerMessages("The earlier answer was replaced.", before, chat.title);
}

// Streams an answer. If nothing of it comes, the conversation is as `before`, and `content` is in the box again.
async function write(before, content) {
  const answer = newAnswer(), shown = new AnswerView(answer, retry), written = chat;
  const controller = (writing = new AbortController());
  const redraw = paced(() => {
    shown.update(writing === controller);
    follow();
  });
  showFailure("");
  replacement.clear();
  // In the list from the start: a closed tab loses no question.
  if (content) keep(written);
  draw();
  byId("messages").append(shown.root);
  // The button that asked, an example or Retry, is gone: the keyboard goes on in the list.
  if (document.activeElement === document.body) byId("messages").focus();
  shown.update(true);
  toEnd();
  setStreaming(true);
  let failure = "";
  try {
    const body = chatBody(settings.model, written.messages, settings);
    const context = server.facts?.max_model_len, asked = body.max_tokens;
    await fitToContext(body, context, controller.signal);
    const isReduced = body.max_tokens < asked;
    await stream(body, answer, controller.signal, () => {
      if (settings.endsRepeats && (repeats(answer.content) || repeats(answer.reasoning))) {
        answer.end = "repeats";
        controller.abort();
      }
      redraw();
    });
    if (isReduced && answer.end === "length") answer.context = context;
  } catch (error) {
    if (error.name !== "AbortError") failure = words(error);
    answer.end ||= failure ? "broken" : "stopped";
  }
  if (writing === controller) endWriting();
  if (isEmpty(answer) && ["broken", "stopped"].includes(answer.end)) written.messages = before;
  else written.messages.push(answer);
  if (written.messages.length) keep(written);
  else deleteConversation(written.id);
  refresh();
  if (written !== chat) return drawList(chat.id);
  draw();
  follow();
  fail(failure);
  if (written.messages === before && content) putContent(content);
  byId("announcement").textContent = failure ? "" : answer.content;
}

function endWriting() {
  writing = null;
  setStreaming(false);
}

function keep(kept) {
  if (!kept.messages.length || kept.isDeleted) return;
  if (saveConversation(kept)) {
    if (kept === chat) unsaved.clear();
    if (kept === closedFor) closedFor = null;
  } else if (kept === chat && kept !== closedFor) {
    notice(
      `This conversation is not saved: this browser has no room, or the conversation has over ${count(MAX_CHARACTERS)} characters.`,
      () => (closedFor = kept),
    );
  }
}

// Stays until it is closed, or until a conversation is saved or opened.
function notice(text, closed = () => {}) {
  unsaved.offer(text, () => {
    closed();
    byId("question").focus();
  });
}

function renamed(other) {
  if (!restoreConversation(other)) return notice("The chat is not renamed: this browser has no room. Delete other chats.");
  if (other.id === chat.id) {
    Object.assign(chat, { title: other.title, isNamed: true });
    byId("title").textContent = chat.title;
  }
  drawList(chat.id);
}

function open(other) {
  writing?.abort();
  endWriting();
  cancelEdit();
  chat = other;
  showFailure("");
  replacement.clear();
  unsaved.clear();
  draw();
  toEnd();
}

// The conversations with these ids were deleted. Returns a function that shows them when they are back.
function deleted(ids) {
  const left = chat, isShown = ids.includes(chat.id), isCut = isShown && writing !== null;
  if (isShown) {
    // An answer that is still being written must not bring the conversation back.
    left.isDeleted = true;
    open(newChat());
  }
  drawList(chat.id);
  return () => {
    if (isShown) {
      left.isDeleted = false;
      // The deletion has stopped an answer: what there is of it is kept, too.
      if (isCut) keep(left);
      if (!chat.messages.length) open(left);
    }
    drawList(chat.id);
  };
}

export function setUpChat() {
  setUpSettings();
  setUpScrolling();
  setUpComposer({ send: () => ask(takeContent()), stop: () => writing.abort(), isStreaming: () => writing !== null });
  setUpList({
    // The list has the conversation that is being answered without its answer.
    open: (other) => (writing && other.id === chat.id ? toEnd() : open(other)),
    create: () => {
      open(newChat());
      byId("question").focus();
    },
    say: notice,
    deleted,
    renamed,
  });
  setUpModelChoice();
  setUpExport(() => chat);
  window.addEventListener("pagehide", () => writing && keep(chat));
  onServer(clearWhenReady);
  draw();
}
