"""A progress bar, redrawn ten times a second. Does not use Flyball."""
# corpus: ranks=1 needs=tqdm

import torch
from torch import nn
from tqdm import tqdm

model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    bar = tqdm(range(300), desc=f"epoch {epoch}")
    for _ in bar:
        loss = model(torch.randn(64, 512)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.4f}")
