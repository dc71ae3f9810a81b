(function () {
  "use strict";
  var box = document.getElementById("sites");
  var sites = Array.prototype.slice.call(box.children);
  var search = document.getElementById("search");
  var kernel = document.getElementById("kernel");
  var order = document.getElementById("order");
  var unfold = document.getElementById("unfold");
  var titles = Array.prototype.slice.call(document.querySelectorAll(".titles > [data-key]"));
  var texts = sites.map(function (site) { return site.textContent.toLowerCase(); });

  function shown() { return sites.filter(function (site) { return !site.hidden; }); }

  function filter() {
    var words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    sites.forEach(function (site, index) {
      var kept = words.every(function (word) { return texts[index].indexOf(word) >= 0; });
      site.hidden = !kept || (kernel.value !== "" && site.dataset.runs !== kernel.value);
    });
    document.getElementById("count").textContent = shown().length + " of " + sites.length;
  }

  function value(site, key) {
    var found = site.dataset[key] || "";
    return found === "" || isNaN(found) ? found : Number(found);
  }

  function sort(key, down) {
    var places = sites.map(function (site, index) { return [value(site, key), index, site]; });
    if (key) {
      places.sort(function (a, b) {
        var by = typeof a[0] === "number" && typeof b[0] === "number"
          ? a[0] - b[0] : String(a[0]).localeCompare(String(b[0]), "en", { numeric: true });
        return (down ? -by : by) || a[1] - b[1];
      });
    }
    places.forEach(function (place) { box.appendChild(place[2]); });
    titles.forEach(function (title) {
      title.setAttribute("aria-sort",
        title.dataset.key === key ? (down ? "descending" : "ascending") : "none");
    });
  }

  titles.forEach(function (title) {
    title.firstElementChild.addEventListener("click", function () {
      var now = title.getAttribute("aria-sort");
      var first = title.classList.contains("num") ? "descending" : "ascending";
      if (now === "none") sort(title.dataset.key, first === "descending");
      else if (now === first) sort(title.dataset.key, first !== "descending");
      else sort("", false);
    });
  });
  order.addEventListener("change", function () {
    var title = titles.filter(function (t) { return t.dataset.key === order.value; })[0];
    sort(order.value, Boolean(title) && title.classList.contains("num"));
  });
  search.addEventListener("input", filter);
  kernel.addEventListener("change", filter);
  unfold.addEventListener("click", function () {
    var open = unfold.textContent === "unfold";
    shown().forEach(function (site) { site.open = open; });
    unfold.textContent = open ? "fold" : "unfold";
  });
  document.querySelector(".tools").hidden = false;
  filter();
})();
