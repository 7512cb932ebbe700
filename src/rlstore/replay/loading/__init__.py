"""Data that were collected before: arrays and episodes, checked and appended to replay storages."""
