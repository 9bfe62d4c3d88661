// Runs a grid: threads.cpp.
#pragma once

#include <functional>
#include <string>

namespace on_cpu {

// Calls `body` in every thread of the grid, block by block, in an order of on_cpu.h. Only one grid runs at a time.
void run_grid(unsigned blocks, unsigned threads, long order, const std::function<void()>& body);

[[noreturn]] void give_up(const std::string& why);

}  // namespace on_cpu
