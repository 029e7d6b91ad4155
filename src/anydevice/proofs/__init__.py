"""Properties that hold for every input of a set, with certificates that anybody can check again.

    from anydevice import proofs

    result = proofs.prove(model, proofs.same_class(3), over=proofs.ball(x, 0.03), limit=60)
    match result:
        case proofs.Proof():
            result.save("digit.proof")
        case proofs.Counterexample():
            print(result.x, result.violation)

Every name loads when it is first used.
"""

from __future__ import annotations

from anydevice.core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice.proofs._certified import certified as certified
    from anydevice.proofs.claims import Claim as Claim
    from anydevice.proofs.claims import claim as claim
    from anydevice.proofs.properties import all_of as all_of
    from anydevice.proofs.properties import any_of as any_of
    from anydevice.proofs.properties import ball as ball
    from anydevice.proofs.properties import box as box
    from anydevice.proofs.properties import finite as finite
    from anydevice.proofs.properties import less as less
    from anydevice.proofs.properties import lipschitz as lipschitz
    from anydevice.proofs.properties import monotone as monotone
    from anydevice.proofs.properties import same_class as same_class
    from anydevice.proofs.properties import within as within
    from anydevice.proofs.proving import Counterexample as Counterexample
    from anydevice.proofs.proving import Proof as Proof
    from anydevice.proofs.proving import Undecided as Undecided
    from anydevice.proofs.proving import prove as prove

_MODULES = {
    "proofs._certified": "certified",
    "proofs.claims": "Claim claim",
    "proofs.properties": "all_of any_of ball box finite less lipschitz monotone same_class within",
    "proofs.proving": "Counterexample Proof Undecided prove",
}
"""The public names by module."""

__all__, __getattr__, __dir__ = _lazy_names(__name__, _MODULES)
