"""Records: what was measured, as frozen values and as versioned JSON. The standard library only.

Stages meet through these files: training writes a `RunRecord`, comparing a `CompareRecord`, diagnosing a `Diagnosis`, a sink
transfer a `TransferRecord`, and the report reads them.

* Reading is strict. An unknown format, version or key, a missing key or a wrong type is a `RecordError` that names it.
* A number that is not finite never reaches a file as such: in a run marked `diverged` it becomes null, elsewhere it is
  a `RecordError`.
* Writing is atomic: a temporary file beside the target, then a rename.
"""

from gated_attn.codec import write_text
from gated_attn.records.diagnosis import (
    AttentionStat,
    Diagnosis,
    Difference,
    GateReading,
    HeadStat,
    Pattern,
    StreamStat,
    TokenView,
    diff,
)
from gated_attn.records.health import GateHealth, HealthPoint, HealthRecord, HealthWarning
from gated_attn.records.runs import (
    GATE_SHUT,
    HISTOGRAM_BINS,
    CompareRecord,
    CompareRow,
    GateStat,
    HistoryPoint,
    Paired,
    RunRecord,
    SampleGates,
    paired_interval,
    t_quantile,
    verdict,
)
from gated_attn.records.transfer import Evidence, SinkLayer, TransferRecord

__all__ = [
    "GATE_SHUT",
    "HISTOGRAM_BINS",
    "AttentionStat",
    "CompareRecord",
    "CompareRow",
    "Diagnosis",
    "Difference",
    "Evidence",
    "GateHealth",
    "GateReading",
    "GateStat",
    "HeadStat",
    "HealthPoint",
    "HealthRecord",
    "HealthWarning",
    "HistoryPoint",
    "Paired",
    "Pattern",
    "RunRecord",
    "SampleGates",
    "SinkLayer",
    "StreamStat",
    "TokenView",
    "TransferRecord",
    "diff",
    "paired_interval",
    "t_quantile",
    "verdict",
    "write_text",
]
