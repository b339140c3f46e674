"""Print the torch version and the GPUs that torch can use. `allranks doctor` prints this and checks for problems.

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
