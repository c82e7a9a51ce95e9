// The page, put together: the feed fills the dashboard and tells the chat about restarts.

import { setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { Dashboard } from "./dashboard.js";
import { LiveFeed } from "./live.js";
import { load, save } from "./storage.js";

const VIEW = "view";

const byId = (id) => document.getElementById(id);

const keyDialog = byId("key-dialog");
let keyRequest = null;

/** Ask for an API key and return when there is a new one; the feed and the chat share one dialog. */
function askForKey(isRefused) {
  keyRequest ??= new Promise((resolve) => {
    const takeKey = () => {
      setApiKey(byId("key").value);
      keyRequest = null;
      resolve();
    };
    byId("key-error").textContent = isRefused ? "The server refused this key." : "";
    keyDialog.querySelector("form").addEventListener("submit", takeKey, { once: true });
    keyDialog.showModal();
    byId("key").select();
  });
  return keyRequest;
}

// Without a key there is nothing to show, so Escape does not close the dialog.
keyDialog.addEventListener("close", () => {
  if (keyRequest !== null) keyDialog.showModal();
});

function showView(view) {
  document.body.dataset.view = view;
  for (const button of document.querySelectorAll(".views button")) {
    button.setAttribute("aria-pressed", button.dataset.view === view);
  }
}

for (const button of document.querySelectorAll(".views button")) {
  button.addEventListener("click", () => {
    showView(button.dataset.view);
    save("sessionStorage", VIEW, button.dataset.view);
  });
}
showView(load("sessionStorage", VIEW) ?? "engine");

const dashboard = new Dashboard();
const chat = new Chat(askForKey);
const feed = new LiveFeed({
  onHello: (facts) => {
    chat.model = facts.model;
    chat.images.setLimits(facts.images);
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
