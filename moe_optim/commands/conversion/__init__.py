"""From one layout of experts to another, and comparisons across them."""
