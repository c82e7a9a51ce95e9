// The page, put together: the feed fills the dashboard and tells the chat about restarts.

import { setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { LiveFeed } from "./live.js";

const byId = (id) => document.getElementById(id);

let keyRequest = null;

/** Ask for an API key and return when there is a new one; the feed and the chat share one dialog. */
function askForKey(isRefused) {
  keyRequest ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-error").textContent = isRefused ? "The server refused this key." : "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.querySelector("form").addEventListener(
      "submit",
      () => {
        setApiKey(byId("key").value);
        keyRequest = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
    byId("key").select();
  });
  return keyRequest;
}

function showView(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll(".views button")) {
    button.setAttribute("aria-pressed", button.dataset.view === view);
  }
}

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => showView(button.dataset.view));
}

const dashboard = new Dashboard();
const chat = new Chat(askForKey);
const feed = new LiveFeed({
  onHello: (facts) => {
    chat.model = facts.model;
    dashboard.showFacts(facts);
  },
  onSnapshot: (snapshot, history) => {
    chat.note(snapshot);
    dashboard.show(snapshot, history);
  },
  onLoading: () => dashboard.showLoading(),
  onLost: (message) => dashboard.showLost(message),
  askForKey,
});
feed.run();
