"use strict";
// Small helpers of the console. Everything works without them, except the live tail.

const editable = (element) => element.matches("input, select, textarea") || element.isContentEditable;

function rows() {
  return [...document.querySelectorAll("[data-row]")];
}

function select(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("selected"));
  const next = all[Math.min(Math.max(at + step, 0), all.length - 1)];
  all.forEach((row) => row.classList.toggle("selected", row === next));
  next.scrollIntoView({ block: "nearest" });
}

function showHelp() {
  const help = document.getElementById("help");
  if (!help.open) help.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("dialog")) return;
  if (editable(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "/") {
    const field = document.querySelector("[data-search]");
    event.preventDefault();
    if (field) {
      field.closest("details")?.setAttribute("open", "");
      field.focus();
    } else document.querySelector("[data-search-page]")?.click();
  } else if (event.key === "j") select(1);
  else if (event.key === "k") select(-1);
  else if (event.key === "Enter" && !event.target.closest("a, button, summary")) {
    document.querySelector("[data-row].selected a")?.click();
  } else if (event.key === "?") showHelp();
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.hasAttribute("data-help")) showHelp();
  if (button.dataset.confirm && !window.confirm(button.dataset.confirm)) event.preventDefault();
  if (button.dataset.copy || button.hasAttribute("data-copy-link")) {
    const text = button.dataset.copy
      ? await (await fetch(button.dataset.copy)).text()
      : window.location.href;
    if (!navigator.clipboard) {
      // Browsers allow copying only over TLS or on this machine: show what was to be copied.
      window.prompt("", text);
      return;
    }
    await navigator.clipboard.writeText(text);
    const before = button.textContent;
    button.textContent = button.dataset.done;
    setTimeout(() => (button.textContent = before), 1500);
  }
});

// A form keeps its empty fields out of the address.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.method !== "get") return;
  for (const field of form.elements) if (field.name && !field.value) field.disabled = true;
  setTimeout(() => [...form.elements].forEach((field) => (field.disabled = false)));
});

async function replaced(url, id, signal) {
  const response = await fetch(url, { signal, headers: { Accept: "text/html" } });
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const fresh = page.getElementById(id);
  const old = document.getElementById(id);
  if (!fresh || !old) throw new Error("the page has another shape");
  // A wide table stays where the reader has scrolled it.
  const scrolled = [...old.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
  old.replaceWith(fresh);
  fresh.querySelectorAll(".scroll").forEach((part, at) => (part.scrollLeft = scrolled[at] ?? 0));
  return fresh;
}

// Sections that show what changes are fetched again, unless the reader has selected something.
async function refresh() {
  const section = document.querySelector("[data-refresh]");
  if (!section) return;
  const busy = section.contains(document.activeElement) || !getSelection().isCollapsed;
  if (!document.hidden && !busy && !section.querySelector(".selected")) {
    try {
      await replaced(location.href, section.id);
    } catch {
      // The server is gone or the page has changed: keep what is shown.
    }
  }
  const next = document.querySelector("[data-refresh]");
  if (next) setTimeout(refresh, 1000 * Number(next.dataset.refresh));
}
const first = document.querySelector("[data-refresh]");
if (first) setTimeout(refresh, 1000 * Number(first.dataset.refresh));

// A slow search can be cancelled: leaving the request stops it on the server.
for (const form of document.querySelectorAll("[data-cancellable]")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const filled = [...new FormData(form)].filter(([, value]) => value);
    const url = `${location.pathname}?${new URLSearchParams(filled)}`;
    const target = document.getElementById(form.dataset.target);
    const control = new AbortController();
    const cancel = Object.assign(document.createElement("button"), {
      type: "button",
      textContent: form.dataset.cancel,
    });
    cancel.addEventListener("click", () => control.abort());
    const note = Object.assign(document.createElement("p"), { textContent: `${form.dataset.running} ` });
    note.append(cancel);
    target.replaceChildren(note);
    try {
      await replaced(url, target.id, control.signal);
      history.pushState(null, "", url);
    } catch (error) {
      note.textContent = error.name === "AbortError" ? form.dataset.cancelled : form.dataset.failed;
    }
  });
}
window.addEventListener("popstate", () => location.reload());
