"""torchrun with LM Resiliency's rendezvous backend: `python agent_lmresiliency.py` in place of `torchrun`.

torch 2.13.0 calls the entry point of a backend without arguments, to get its creator from it. That of LM Resiliency
0.2.0 is the creator itself, which needs one: `torchrun --rdzv-backend=lm_resiliency` says that it does not know it.
"""

from __future__ import annotations

from lm_resiliency.integrations.torchrun import create_rendezvous_handler
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

if __name__ == "__main__":
    rendezvous_handler_registry.register("lm_resiliency", create_rendezvous_handler)
    main()
