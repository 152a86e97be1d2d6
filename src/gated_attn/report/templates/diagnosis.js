// Tells the value of what is pointed at or tapped, and shades the text by the layer and head that a reader picks.
for (const figure of document.querySelectorAll("figure.grid")) {
  const output = figure.querySelector("output");
  let chosen = null;
  figure.addEventListener("click", (e) => {
    const cell = e.target.closest("td[title]");
    if (!cell) return;
    if (chosen) chosen.classList.remove("chosen");
    chosen = cell;
    cell.classList.add("chosen");
    output.textContent = cell.title;
  });
}

for (const view of document.querySelectorAll(".view")) {
  const values = JSON.parse(view.querySelector("script").textContent); // [0 is the mean, then layers][the same for heads][token]
  const low = Number(view.dataset.low);
  const high = Number(view.dataset.high);
  const pickLayer = view.querySelector(".pick-layer");
  const pickHead = view.querySelector(".pick-head");
  const output = view.querySelector("output");
  const spans = [...view.querySelectorAll(".shown .tokens span")];
  let chosen = null;

  function draw() {
    const row = values[Number(pickLayer.value)][Number(pickHead.value)];
    spans.forEach((span, t) => {
      const value = row[t] === null ? null : row[t] / 1000;
      span.style.setProperty("--g", value === null ? 0 : Math.min(Math.max((value - low) / (high - low), 0), 1));
      span.title = value === null ? "-" : value.toFixed(3);
    });
    if (chosen) tell(chosen);
  }

  function tell(span) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = span;
    span.classList.add("chosen");
    const layer = span.closest(".layer");
    const picked = (pick, name) => (pick.selectedIndex ? name + " " + pick.selectedOptions[0].text : "mean of " + name + "s");
    const where = layer ? layer.querySelector("h4").textContent + ", mean of heads" : picked(pickLayer, "layer") + ", " + picked(pickHead, "head");
    output.textContent = span.textContent + ": " + span.title + " (" + where + ")";
  }

  for (const event of ["click", "mouseover"]) {
    view.addEventListener(event, (e) => {
      if (e.target.matches(".tokens span")) tell(e.target);
    });
  }
  pickLayer.addEventListener("change", draw);
  pickHead.addEventListener("change", draw);
  view.querySelector(".controls").hidden = false;
  draw();
}

const texts = document.querySelector("#token-texts");
const tokens = texts ? JSON.parse(texts.textContent) : [];
for (const part of document.querySelectorAll(".weights")) {
  const weights = JSON.parse(part.querySelector("script").textContent); // thousandths, [query][key]
  const drawing = part.querySelector("svg");
  const name = (i) => i + (i < tokens.length ? " " + tokens[i] : "");
  const tell = (e) => {
    const at = new DOMPoint(e.clientX, e.clientY).matrixTransform(drawing.getScreenCTM().inverse());
    const [query, key] = [Math.floor(at.y), Math.floor(at.x)];
    const weight = weights[query] && weights[query][key];
    if (weight === undefined) return;
    document.querySelector("#weight").textContent =
      "query " + name(query) + " on key " + name(key) + ": " + (weight / 1000).toFixed(3);
  };
  drawing.addEventListener("click", tell);
  drawing.addEventListener("mousemove", tell);
}
