{{/* Names. A seat's pod name is its fleet's name, at most 63 characters: so much is left for us. */}}
{{- define "pdserve.fullname" -}}
{{- $long := .Values.fullnameOverride -}}
{{- if not $long -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $long = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full := $long | replace "." "-" | trunc 36 | regexFind "^.*[^-]" -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- fail (printf "%s: Services and Ray clusters have names that begin with a letter: give fullnameOverride one" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{- define "pdserve.instance" -}}
pdserve.io/instance: {{ include "pdserve.fullname" . }}
{{- end -}}

{{/* Labels of objects. */}}
{{- define "pdserve.labels" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "pdserve.instance" . }}
{{- with .Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The same and more, (dict "root" $ "more" .Values.monitoring.labels): a key of both stands once, as in `more`. */}}
{{- define "pdserve.labelsAnd" -}}
{{- merge (dict) (.more | default dict) (include "pdserve.labels" .root | fromYaml) | toYaml -}}
{{- end -}}

{{/* What selects the pods of a component: (dict "root" $ "component" "router"). */}}
{{- define "pdserve.selector" -}}
{{ include "pdserve.instance" .root }}
pdserve.io/component: {{ .component }}
{{- end -}}

{{- define "pdserve.podLabels" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{ include "pdserve.selector" . }}
{{- with .root.Values.extraLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pdserve.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "pdserve.secret.fleet" -}}
{{ .Values.secrets.fleet | default (printf "%s-fleet" (include "pdserve.fullname" .)) }}
{{- end -}}
{{- define "pdserve.secret.rayToken" -}}
{{ .Values.secrets.rayToken | default (printf "%s-ray-token" (include "pdserve.fullname" .)) }}
{{- end -}}
{{- define "pdserve.secret.tls" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{ required "tls.secretName: with tls.mode secret name the Secret that has ca.crt, tls.crt and tls.key" .Values.tls.secretName }}
{{- else -}}
{{ include "pdserve.fullname" . }}-node
{{- end -}}
{{- end -}}

{{- define "pdserve.headService" -}}
{{ include "pdserve.fullname" . }}-head-svc
{{- end -}}

{{/* A worker's address in the cluster: any address behind the headless Service of the routers. */}}
{{- define "pdserve.routers" -}}
dns+{{ include "pdserve.fullname" . }}-routers.{{ .Release.Namespace }}.svc:50051
{{- end -}}

{{/* Settings as TOML: whole numbers stay whole, which Helm's own toToml would not do. */}}
{{- define "pdserve.toml" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ include "pdserve.tomlValue" $value }}
{{- end }}
{{- end -}}
{{- define "pdserve.tomlValue" -}}
{{- if kindIs "string" . -}}
{{ . | quote }}
{{- else if kindIs "bool" . -}}
{{ . }}
{{- else if kindIs "slice" . -}}
{{ . | toJson }}
{{- else if eq (float64 (int64 .)) (float64 .) -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{/* Of a role, (dict "root" $ "role" .Values.prefill): seats that there are at least. */}}
{{- define "pdserve.minReplicas" -}}
{{- if eq .root.Values.autoscaling.kind "none" -}}{{ int .role.replicas }}{{- else -}}{{ int .role.autoscaling.minReplicas }}{{- end -}}
{{- end -}}

{{/* Seats that a rollout adds for a while. A new worker can only start first where Ray has a node for it, or gets one. */}}
{{- define "pdserve.surge" -}}
{{- $alone := eq (include "pdserve.minReplicas" .) "1" -}}
{{- if or (eq .role.rollout "surge") (and (eq .role.rollout "auto") $alone .root.Values.ray.autoscaling) -}}1{{- else -}}0{{- end -}}
{{- end -}}

{{/* Nodes at most. Ray adds them by need alone, so there is room for scaling by hand too; without its autoscaler
there are as many as can ever be needed. */}}
{{- define "pdserve.maxNodes" -}}
{{- $most := int .role.replicas -}}
{{- if or .root.Values.ray.autoscaling (ne .root.Values.autoscaling.kind "none") -}}
{{- $most = max (int (include "pdserve.minReplicas" .)) (int .role.autoscaling.maxReplicas) -}}
{{- end -}}
{{ add $most (int (include "pdserve.surge" .)) }}
{{- end -}}
{{- define "pdserve.minNodes" -}}
{{- if .root.Values.ray.autoscaling -}}{{ include "pdserve.minReplicas" . }}{{- else -}}{{ include "pdserve.maxNodes" . }}{{- end -}}
{{- end -}}
