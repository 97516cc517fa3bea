"""Measurements that explain themselves, and what is shown of a store.

| Module             | One job                                                         |
|--------------------|-----------------------------------------------------------------|
| `workloads`        | what is run: questions over documents, prompts of random tokens |
| `situations`       | the demo's situations, and whether a run was what it claims     |
| `demo`             | runs questions in every situation                               |
| `demo_report`      | medians over the questions, a conclusion, JSON                  |
| `demo_view`        | the demo on a terminal                                          |
| `ttft_bench`       | TTFT of every variant, interleaved, in one engine               |
| `bench_view`       | the benchmark on a terminal                                     |
| `index_bench`      | the segment index's memory and speed, as table and plot         |
| `store_bench`      | the store's read and write path against the machine's           |
| `store_measures`   | the single measures of it                                       |
| `store_bench_view` | its table                                                       |
| `store_report`     | what `daric store` says, as JSON and text                       |
| `store_view`       | the same as tables                                              |
| `trace_view`       | a request's trace on a terminal                                 |
| `units`            | bytes and durations, read and written                           |
| `terminal`         | what commands share on a terminal                               |
| `machine`          | what figures were measured on                                   |
| `metrics`          | how answers are scored                                          |

Engines come in through the `Engine` protocol and a few methods more, so that tests run
everything on a fake.
"""
