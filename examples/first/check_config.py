"""Which torch this is, and which GPUs it sees; `allranks doctor` says this, and what else may be wrong.

python examples/first/check_config.py

Source: a user's `check_config.py`.
"""

from __future__ import annotations

import torch

print(f"torch version : {torch.__version__}")
print(f"torch git version : {torch.version.git_version}")
print(f"torch version cuda : {torch.version.cuda}")
print(f"number of cuda device(s) : {torch.cuda.device_count()}")
for device in range(torch.cuda.device_count()):
    print(f"- device {device} : {torch.cuda.get_device_properties(device)}")
