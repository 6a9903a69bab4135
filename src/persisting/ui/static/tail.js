"use strict";
// Follows a topic. Records arrive as text and are only ever shown as text.

const list = document.getElementById("tail");
const state = document.getElementById("tail-state");
const problem = document.getElementById("tail-problem");
const pause = document.getElementById("pause");
const words = state.dataset;
const MOST_ROWS = 500;
const RETRY_MS = 5000;
let source = null;
let again = 0;
let place = "";
let skipped = 0;
let filtered = 0;

function tell(text) {
  const parts = [text];
  if (skipped) parts.push(words.skipped.replace("{count}", skipped.toLocaleString()));
  if (filtered) parts.push(words.filtered.replace("{count}", filtered.toLocaleString()));
  state.textContent = parts.join(" · ");
}

function show(record) {
  const row = document.createElement("li");
  row.dataset.row = "";
  const link = document.createElement("a");
  link.href = `${list.dataset.records}${record.bucket}/${record.offset}`;
  link.textContent = `${record.bucket}:${record.offset}`;
  const time = document.createElement("span");
  time.className = "note";
  time.textContent = `${record.time} `;
  row.append(link, time, record.text);
  list.prepend(row);
  while (list.childElementCount > MOST_ROWS) list.lastElementChild.remove();
}

function follow() {
  const url = new URL(list.dataset.events, location.href);
  if (place) url.searchParams.set("from", place);
  source = new EventSource(url);
  source.addEventListener("start", () => tell(words.following));
  source.addEventListener("records", (event) => {
    const data = JSON.parse(event.data);
    place = event.lastEventId;
    skipped += data.skipped;
    filtered += data.filtered;
    problem.hidden = true;
    data.records.forEach(show);
    tell(words.following);
  });
  source.addEventListener("restored", (event) => {
    problem.textContent = words.restored.replace("{bucket}", JSON.parse(event.data).bucket);
    problem.hidden = false;
  });
  source.addEventListener("problem", (event) => {
    problem.textContent = JSON.parse(event.data).message;
    problem.hidden = false;
  });
  source.onerror = () => {
    tell(words.lost);
    // Browsers try again by themselves, except where the server has refused.
    if (source?.readyState === EventSource.CLOSED) again = setTimeout(follow, RETRY_MS);
  };
}

pause.addEventListener("click", () => {
  const other = pause.dataset.resume;
  pause.dataset.resume = pause.textContent;
  pause.textContent = other;
  if (source) {
    clearTimeout(again);
    source.close();
    source = null;
    tell(words.paused);
  } else {
    follow();
  }
});

follow();
window.addEventListener("pagehide", () => source?.close());
