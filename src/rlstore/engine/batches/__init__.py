"""From rows to tensors."""
