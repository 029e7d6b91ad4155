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

from anydevice._core.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False  # what a type checker sees; at run time each name loads on first use
if TYPE_CHECKING:
    from anydevice._proofs.certified import certified as certified
    from anydevice._proofs.claims import Claim as Claim
    from anydevice._proofs.claims import claim as claim
    from anydevice._proofs.properties import all_of as all_of
    from anydevice._proofs.properties import any_of as any_of
    from anydevice._proofs.properties import ball as ball
    from anydevice._proofs.properties import box as box
    from anydevice._proofs.properties import finite as finite
    from anydevice._proofs.properties import less as less
    from anydevice._proofs.properties import lipschitz as lipschitz
    from anydevice._proofs.properties import monotone as monotone
    from anydevice._proofs.properties import same_class as same_class
    from anydevice._proofs.properties import within as within
    from anydevice._proofs.prove import Counterexample as Counterexample
    from anydevice._proofs.prove import Proof as Proof
    from anydevice._proofs.prove import Undecided as Undecided
    from anydevice._proofs.prove import prove as prove

_MODULES = {
    "_proofs.certified": "certified",
    "_proofs.claims": "Claim claim",
    "_proofs.properties": "all_of any_of ball box finite less lipschitz monotone same_class within",
    "_proofs.prove": "Counterexample Proof Undecided prove",
}
"""The public names by module."""

__all__, __getattr__, __dir__ = _lazy_names(__name__, _MODULES)
