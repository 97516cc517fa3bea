"""Measurements that explain themselves: the demo and the TTFT benchmark.

| Module        | One job                                                         |
|---------------|-----------------------------------------------------------------|
| `workloads`   | what is run: questions over documents, prompts of random tokens |
| `situations`  | the demo's situations, and whether a run was what it claims     |
| `demo`        | runs questions in every situation                               |
| `demo_report` | medians over the questions, a conclusion, JSON                  |
| `demo_view`   | the demo on a terminal                                          |
| `ttft_bench`  | TTFT of every variant, interleaved, in one engine               |
| `bench_view`  | the benchmark on a terminal                                     |
| `terminal`    | what both share on a terminal                                   |
| `machine`     | what figures were measured on                                   |
| `metrics`     | how answers are scored                                          |

Engines come in through the `Engine` protocol and a few methods more, so that tests run
everything on a fake.
"""
