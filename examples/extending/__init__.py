"""Files of docs/how-to/extending.md: each is copied where the page says, and runs there."""
