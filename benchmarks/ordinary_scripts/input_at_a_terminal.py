"""Asks at the terminal whether to continue; the answer is typed 12 s later."""
# corpus: ranks=1 answers-after=12

import torch
from torch import nn

model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(600):
    loss = model(torch.randn(64, 256)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 300:
        print(f"loss {loss.item():.3f}. Go on? ", end="", flush=True)
        assert input() == "yes"
print("done", flush=True)
