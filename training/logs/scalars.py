"""A record as one number per name, for logs that draw curves."""

from __future__ import annotations

from ..listener import OfferRecord, StepRecord


def scalars(record: StepRecord) -> dict[str, float]:
    """By names with a group before the slash; what is not known is left out."""
    found: dict[str, float | None] = {
        "train/loss": record.loss,
        "train/gradient_norm": record.gradient_norm,
        "speed/step_s": record.seconds,
        "speed/predicted_step_s": record.predicted_s,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/model_flops_utilisation": record.model_flops_utilisation,
        "ssd/written_bytes": record.ssd_written_bytes,
        "ssd/wear_share": record.ssd_wear_share,
    }
    if record.predicted_s and record.seconds:
        found["speed/measured_over_predicted"] = record.seconds / record.predicted_s
    rates = record.learning_rates
    for index, rate in enumerate(rates):
        found["train/learning_rate" if len(rates) == 1 else f"train/learning_rate/group{index}"] = rate
    found |= {f"peak_bytes/{memory}": peak for memory, peak in record.peak_bytes.items()}
    found |= {f"moved_bytes/{route.replace(' -> ', '_to_')}": count for route, count in record.moved_bytes.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def offer_scalars(offer: OfferRecord) -> dict[str, float]:
    """The step of the plan at hand and of the one offered on the machine as it is, and the slowness of devices."""
    slow = {f"offer/times_as_long/{device}": times for device, times in offer.times.items()}
    return {"offer/step_s": offer.before_s, "offer/offered_step_s": offer.after_s, **slow}
