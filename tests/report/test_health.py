"""Gates over steps as a page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gated_attn.errors import MissingExtraError
from gated_attn.records import GateHealth, HealthPoint, HealthRecord, HealthWarning
from gated_attn.report.health import STEPS, pictures_of, render_health, shortened, write_health_report
from tests.report.conftest import build_health
from tests.report.pages import Page

pytest.importorskip("jinja2")


def test_every_gate_and_warning_is_there() -> None:
    record = build_health()
    page = Page(render_health(record, "a run"))
    text = "".join(page.text)
    titles = {a.get("title") for a in page.named("td")}
    for point in record.points:
        for gate in point.gates:
            assert f"{gate.name}, step {point.step}: {sum(gate.mean) / len(gate.mean):.3f}" in titles
            assert f"{gate.name}, step {point.step}: {gate.weight_norm:.4g}" in titles
    for warning in record.warnings:
        assert warning.text in text
    for told in ("Gate below 0.05", "Gate above 0.95", "share of values with |g| < 0.05", "a run: gates over steps"):
        assert told in text
    assert len(page.named("svg", "figure")) == 6
    ids = {a["id"] for _, a in page.tags if "id" in a}
    assert {(a["href"] or "").removeprefix("#") for a in page.named("a")} <= ids


def test_a_gate_read_in_attention_has_norms_only() -> None:
    gates = (GateHealth(name="a", spec="output:headwise:sigmoid,source=lse", change=0.5),)
    record = HealthRecord(low=0.05, high=0.95, points=(HealthPoint(step=1, gates=gates), HealthPoint(step=2, gates=())))
    assert [picture.key for picture in pictures_of(record)] == ["change"]
    assert "not a gate" not in render_health(record)


def test_no_step_and_hostile_names() -> None:
    assert "No step was measured." in render_health(HealthRecord(low=0.05, high=0.95))
    evil = "</script><script>alert(1)</script>'\"<b>"
    gate = GateHealth(name=evil, spec=evil, mean=(0.5,), below=(0.0,), above=(0.0,))
    record = HealthRecord(
        low=0.05, high=0.95, points=(HealthPoint(step=1, gates=(gate,)),), warnings=(HealthWarning(step=1, text=evil),)
    )
    page = Page(render_health(record, evil))
    assert len(page.named("script")) == 1
    assert evil in "".join(page.text)


@pytest.mark.parametrize(
    ("names", "group", "labels"),
    [
        (["m.0.gate", "m.11.gate"], "m.*.gate", ["0", "11"]),
        (["m.0.self.gate", "m.0.cross.gate", "m.1.self.gate"], "m.*.gate", ["0.self", "0.cross", "1.self"]),
        (["a", "b"], "", ["a", "b"]),
        (["m.0.gate"], "", ["m.0.gate"]),
        (["m.gate", "m.gate.gate"], "m.*", ["gate", "gate.gate"]),
        ([], "", []),
    ],
)
def test_names_lose_what_they_share(names: list[str], group: str, labels: list[str]) -> None:
    assert shortened(names) == (group, dict(zip(names, labels, strict=True)))


def test_many_steps_are_spread_and_it_is_said() -> None:
    text = render_health(build_health(steps=100))
    assert f"{STEPS} of 100 steps are drawn, evenly spaced." in text


def test_pngs_lie_beside_it_and_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    write_health_report(build_health(), tmp_path / "report.html")
    keys = ("above", "below", "change", "grad-norm", "mean", "weight-norm")
    assert sorted(path.name for path in tmp_path.iterdir()) == [*(f"report-{key}.png" for key in keys), "report.html"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match="matplotlib"):
        write_health_report(build_health(), tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()
