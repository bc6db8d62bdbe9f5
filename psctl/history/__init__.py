"""`psctl check-history`: whether a run kept its promises, from what it wrote down."""
