"""The page that browsers get at / of the HTTP: hand-written and served as it is. It fetches nothing from elsewhere."""
