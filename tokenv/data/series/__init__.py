"""Time series: tables of recorded series, and the windows cut from them."""
