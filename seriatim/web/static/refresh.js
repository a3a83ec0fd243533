// Takes over the colours of the Airflow around the page. Every few seconds it replaces the content by
// fresh content and keeps the scroll position. Without it a page is as readable, and stays as it was
// when it was loaded.
(function () {
  "use strict";
  var EVERY_MS = 15000;
  function colours() {
    var theme = null;
    try { theme = localStorage.getItem("theme"); } catch (error) { theme = null; }
    if (theme === "light" || theme === "dark") { document.documentElement.dataset.theme = theme; }
    else { delete document.documentElement.dataset.theme; }
  }
  function tell(text) {
    var line = document.getElementById("stale");
    if (line) { line.textContent = text; line.classList.toggle("shown", text !== ""); }
  }
  function swap(text) {
    var fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
    var old = document.querySelector("main");
    if (!fresh || !old) { return; }
    var sideways = Array.from(old.querySelectorAll(".wide"), function (one) { return one.scrollLeft; });
    old.querySelectorAll("details[open][id]").forEach(function (one) {
      var same = fresh.querySelector("#" + CSS.escape(one.id));
      if (same) { same.setAttribute("open", ""); }
    });
    old.replaceWith(fresh);
    fresh.querySelectorAll(".wide").forEach(function (one, i) { one.scrollLeft = sideways[i] || 0; });
  }
  function refresh() {
    if (document.hidden || !document.querySelector("main[data-fresh]")) { return; }
    fetch(location.href, { credentials: "same-origin", headers: { "Accept": "text/plain" }, redirect: "error" })
      .then(function (answer) {
        if (answer.status === 401) { throw new Error("you are logged out: load the page again"); }
        if (!answer.ok) { throw new Error("the server answers " + answer.status); }
        return answer.text();
      })
      .then(function (text) { swap(text); tell(""); })
      .catch(function (error) { tell("not refreshed: " + error.message); });
  }
  colours();
  addEventListener("storage", colours);
  setInterval(refresh, EVERY_MS);
  addEventListener("visibilitychange", refresh);
})();
