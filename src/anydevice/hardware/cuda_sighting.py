"""What the answers of NVML and of the CUDA driver mean: pure, so that recordings can test it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anydevice.core.facts import Facts, compare_versions
from anydevice.core.finding import Seen, Sighting
from anydevice.core.record import Record
from anydevice.hardware import cuda_cards, cuda_mend, cuda_visible
from anydevice.hardware.child import Outcome
from anydevice.hardware.cuda_cards import Card
from anydevice.hardware.cuda_surroundings import Surroundings
from anydevice.hardware.cuda_trouble import (
    Trouble,
    driver_missing,
    driver_sees_none,
    driver_trouble,
    lost_cards,
    not_installed,
    nvml_trouble,
)

OLDEST_CAPABILITY = (5, 0)
OLDEST_CUDA = "12.0"


class Evidence(Record):
    """Everything that was learnt in one look.

    `driver` is `None` where no driver is installed. `unhidden` is the driver's answer without
    CUDA_VISIBLE_DEVICES, where with it there was no device and NVML could not tell why.
    """

    around: Surroundings
    environment: Mapping[str, str]
    nvml: Outcome
    driver: Outcome | None = None
    unhidden: Outcome | None = None

    @property
    def visible(self) -> str | None:
        return self.environment.get(cuda_visible.VISIBLE)


def driver_needed(nvml: Outcome) -> bool:
    """Whether the CUDA driver is to be asked too: wherever it may be installed.

    NVML answers on many a machine on which `cuInit` fails or hangs, and only the driver knows in
    which order it counts cards of different models.
    """
    if nvml.how != "answered":
        return True
    return bool(nvml.answer["driver_library"] or nvml.answer["driver_problem"])


def hidden_perhaps(nvml: Outcome, driver: Outcome, environment: Mapping[str, str]) -> bool:
    """Whether the driver may see no device only because CUDA_VISIBLE_DEVICES hides them."""
    return cuda_visible.VISIBLE in environment and driver_sees_none(driver) and not _cards(nvml)


def interpret(evidence: Evidence) -> Sighting:
    """What the evidence says of the CUDA backend. Never raises on a recorded answer."""
    cards = _cards(evidence.nvml)
    devices = _devices(evidence.driver, evidence.around)
    if cards:
        return _from_nvml(evidence, cards, devices)
    nvml = nvml_trouble(evidence.nvml, evidence.around)
    if devices:
        notes = (nvml.reason,) if nvml else ()
        return _sighting(evidence, devices, notes=notes)
    unhidden = _devices(evidence.unhidden, evidence.around)
    if unhidden:
        return _hidden(evidence, unhidden, problem=None, notes=())
    driver = driver_trouble(evidence.driver, evidence.around)
    troubles = [trouble for trouble in (nvml, driver) if trouble is not None]
    return _failed(evidence, troubles)


def _from_nvml(evidence: Evidence, cards: Sequence[Card], devices: tuple[Facts, ...]) -> Sighting:
    notes = lost_cards(evidence.nvml)
    selection = cuda_visible.select([card.names for card in cards], evidence.visible)
    selected = tuple(cards[place.card].at(place) for place in selection.places)
    if devices:
        shown = cuda_cards.in_order_of_driver(cards, devices)
        # Where the driver reads the variable in another way, our reason is not its own.
        problem = selection.problem if len(shown) == len(selected) else None
        notes = (*notes, *_partly_hidden(evidence, shown, cards, problem))
        return _sighting(evidence, shown, notes=notes)
    if not selected and driver_sees_none(evidence.driver):
        return _none_shown(evidence, cards, selection.problem, notes)
    around = evidence.around
    trouble = driver_trouble(evidence.driver, around) or driver_missing(around)
    notes = (*notes, *_partly_hidden(evidence, selected, cards, selection.problem))
    return _sighting(evidence, selected, notes=notes, trouble=trouble)


def _none_shown(
    evidence: Evidence, cards: Sequence[Card], problem: str | None, notes: tuple[str, ...]
) -> Sighting:
    if evidence.visible is not None:
        return _hidden(evidence, _showable(cards), problem, notes)
    return Sighting(
        "cuda",
        present=True,
        stage="device",
        reason="MIG mode is on, and no MIG instance has been made",
        mend="make an instance, or switch MIG mode off: sudo nvidia-smi -mig 0",
        notes=notes,
    )


def _sighting(
    evidence: Evidence,
    shown: Sequence[Facts],
    notes: tuple[str, ...] = (),
    trouble: Trouble | None = None,
) -> Sighting:
    trouble = trouble or _old_driver(shown[0], evidence.around)
    return Sighting(
        "cuda",
        present=True,
        devices=tuple(_seen(index, facts) for index, facts in enumerate(shown)),
        stage="driver" if trouble else None,
        reason=trouble.reason if trouble else None,
        mend=trouble.mend if trouble else None,
        notes=notes,
    )


def _seen(index: int, facts: Facts) -> Seen:
    capability = cuda_cards.capability_numbers(facts)
    if capability is not None and capability < OLDEST_CAPABILITY:
        reason = f"compute capability {facts.compute_capability} is older than 5.0 (Maxwell)"
        return Seen(index, "gpu", facts, reason)
    if facts.details.get("compute_mode") == "prohibited":
        reason = "its compute mode is Prohibited: no program may compute on it"
        return Seen(index, "gpu", facts, reason, f"sudo nvidia-smi -i {facts.uuid} -c DEFAULT")
    return Seen(index, "gpu", facts)


def _old_driver(facts: Facts, around: Surroundings) -> Trouble | None:
    if facts.runtime_version is not None:
        if compare_versions(facts.runtime_version, OLDEST_CUDA) >= 0:
            return None
        serves = f" serves CUDA {facts.runtime_version}"
    else:
        oldest = cuda_mend.OLDEST_DRIVER.get(around.system)
        number = facts.driver_version
        if number is None or oldest is None or compare_versions(number, oldest) >= 0:
            return None
        serves = f" is older than {oldest}"
    version = f" {facts.driver_version}" if facts.driver_version else ""
    reason = f"driver{version}{serves}, and CUDA 12 or newer is needed"
    return Trouble(reason, cuda_mend.update_driver(around))


def _showable(cards: Sequence[Card]) -> list[Facts]:
    return [facts for card in cards for facts in (card.instances or (card.facts,))]


def _hidden(
    evidence: Evidence, devices: Sequence[Facts], problem: str | None, notes: tuple[str, ...]
) -> Sighting:
    because = f" ({problem})" if problem and evidence.visible else ""
    valid = ", ".join(
        f"{facts.uuid or index} ({facts.name})" for index, facts in enumerate(devices)
    )
    last = len(devices) - 1
    numbers = "0" if last == 0 else f"0 to {last}"
    return Sighting(
        "cuda",
        present=True,
        stage="device",
        reason=f'{cuda_visible.VISIBLE}="{evidence.visible}" hides every device{because};'
        f" it takes {numbers}, or {valid}",
        mend=_unset(evidence.around),
        notes=notes,
    )


def _unset(around: Surroundings) -> str:
    if around.system == "win32":
        return f"set {cuda_visible.VISIBLE}="
    return f"unset {cuda_visible.VISIBLE}"


def _partly_hidden(
    evidence: Evidence, shown: Sequence[Facts], cards: Sequence[Card], problem: str | None = None
) -> tuple[str, ...]:
    every = len(_showable(cards))
    if len(shown) == every:
        return ()
    if evidence.visible is not None:
        because = f" ({problem})" if problem else ""
        name = f'{cuda_visible.VISIBLE}="{evidence.visible}"'
        return (f"{name} shows {len(shown)} of {every} devices{because}",)
    if any(card.names.mig for card in cards):
        return (f"a process sees one MIG instance and no other card: {len(shown)} of {every}",)
    return (f"CUDA shows {len(shown)} of the {every} cards that NVML knows",)


def _failed(evidence: Evidence, troubles: Sequence[Trouble]) -> Sighting:
    if not troubles:
        return not_installed(evidence.around)
    around = evidence.around
    reason = "; ".join(trouble.reason for trouble in troubles)
    mend = next((trouble.mend for trouble in troubles if trouble.coded), troubles[0].mend)
    no_card = around.system == "linux" and not (around.cards or around.nodes or around.tegra)
    if no_card and not around.wsl and all(trouble.coded for trouble in troubles):
        reason += "; no NVIDIA card is on the PCI bus"
        mend = None
    return Sighting("cuda", present=True, stage="driver", reason=reason, mend=mend)


def _cards(nvml: Outcome) -> tuple[Card, ...]:
    if nvml.how != "answered" or nvml.answer["library"] is None:
        return ()
    return cuda_cards.cards_of_nvml(nvml.answer)


def _devices(driver: Outcome | None, around: Surroundings) -> tuple[Facts, ...]:
    if driver is None or driver.how != "answered" or driver.answer["library"] is None:
        return ()
    return cuda_cards.devices_of_driver(driver.answer, around)
