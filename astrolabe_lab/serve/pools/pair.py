"""One choice of a router of pools, and the way of a request to the engines that were chosen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from astrolabe_lab.disagg.view import PoolsView
from astrolabe_lab.request import Request
from astrolabe_lab.serve.dispatch import Decision, Dispatch
from astrolabe_lab.serve.instance import Instance
from astrolabe_lab.serve.openai_api import Asked


@dataclass(slots=True)
class Pair:
    """``prefill``, ``decode``: the instances; prefill is None where decode computes the prompt itself. ``seen``: what
    the policy was shown."""

    prefill: Instance | None
    decode: Instance
    seen: PoolsView
    decided_s: float  # modelled
    seconds: float  # wall

    def decision(self) -> Decision:
        """The second step as ``Dispatch`` takes it."""
        return Decision(self.decode, _View(self), self.decided_s, self.seconds)


@dataclass
class PairDispatch(Dispatch):
    """The second step: to the decode engine, as any request goes to its engine. ``pulled``: requests whose answer has
    begun, so that their blocks have been pulled."""

    n_prefill: int = 1
    pulled: set[int] = field(default_factory=set)

    async def post(self, http, asked: Asked, request: Request, instance: Instance, change):
        """Send ``change(body)`` with the client's headers."""
        return await self._send(http, replace(asked, body=change(asked.body)), request, instance)

    async def _write(self, http, answer, chunk: bytes, upstream, request, decision, patience) -> None:
        if upstream.status == 200:
            self.pulled.add(request.rid)
        await super()._write(http, answer, chunk, upstream, request, decision, patience)

    def _headers(self, upstream, request: Request, decision: Decision) -> dict:
        headers = super()._headers(upstream, request, decision)
        pair: Pair = decision.view.pair
        headers["X-Astrolabe-Prefill-Instance"] = str(pair.prefill.index if pair.prefill else -1)
        headers["X-Astrolabe-Decode-Instance"] = str(pair.decode.index - self.n_prefill)
        return headers


@dataclass(slots=True)
class _View:
    """What ``Dispatch`` reads of a view."""

    pair: Pair
    predictions: dict = field(default_factory=dict)
    predicted_e2e_s: dict = field(default_factory=dict)
    late: int = 0
