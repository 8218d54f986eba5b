"""`strata jobs`: `listing` shows jobs, `control` changes them."""
