"""Parts of ``gpu_check.py``: what is checked, what is measured, and what is shown of it."""
