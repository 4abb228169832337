"""HTTP code that the routes of all APIs share."""
