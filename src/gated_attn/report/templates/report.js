// Lets a reader choose the layer and head whose gates shade the sentence; without it the page shows means over heads.
for (const sample of document.querySelectorAll(".sample")) {
  const gates = JSON.parse(sample.querySelector("script").textContent); // [layer][0 is the mean, then heads][token]
  const low = Number(sample.dataset.low);
  const high = Number(sample.dataset.high);
  const pickLayer = sample.querySelector(".pick-layer");
  const pickHead = sample.querySelector(".pick-head");
  const output = sample.querySelector("output");
  const layers = [...sample.querySelectorAll(".layer")];
  let chosen = null;

  function draw() {
    layers.forEach((layer, i) => {
      layer.hidden = pickLayer.value !== "" && Number(pickLayer.value) !== i;
      const values = gates[i][Number(pickHead.value)];
      layer.querySelectorAll(".tokens span").forEach((span, t) => {
        const value = values[t] === null ? null : values[t] / 1000;
        span.style.setProperty("--g", value === null ? 0 : Math.min(Math.max((value - low) / (high - low), 0), 1));
        span.title = value === null ? "-" : value.toFixed(3);
      });
    });
    if (chosen) tell(chosen);
  }

  function tell(span) {
    if (chosen) chosen.classList.remove("chosen");
    chosen = span;
    span.classList.add("chosen");
    const name = span.closest(".layer").querySelector("h4").textContent;
    const head = pickHead.selectedIndex ? "head " + pickHead.selectedOptions[0].text : "mean of its heads";
    output.textContent = span.textContent + ": gate " + span.title + " (" + name + ", " + head + ")";
  }

  for (const event of ["click", "mouseover"]) {
    sample.addEventListener(event, (e) => {
      if (e.target.matches(".tokens span")) tell(e.target);
    });
  }
  pickLayer.addEventListener("change", draw);
  pickHead.addEventListener("change", draw);
  sample.querySelector(".controls").hidden = false;
}
