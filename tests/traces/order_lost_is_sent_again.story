An order is lost on its way.
Rule: what the levels do not confirm within order_timeout is sent again, under the same number.

given
    block size 2
    worker w0 blocks 4 step 20
    store s0 budget 8
    gateway g0
    client c0 prompt 2 max 4

story
    lose k1 -> w0 Admit c0
    come c0
    run 470
    expect w0 has c0
    finish
    expect c0 tokens == 4
    expect w0 orders_seen == 1
