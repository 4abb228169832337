"""Routes for operators, the API docs, and the web page."""
