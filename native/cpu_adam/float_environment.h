#pragma once

#include <cfenv>

namespace infinity::cpu_adam {

// The IEEE-754 defaults (round to nearest, subnormals kept) for the current thread while the object lives. A caller may have set
// flush-to-zero (torch.set_flush_denormal) or a rounding mode, and a new thread inherits both.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace infinity::cpu_adam
